"""Streams of every route end in exactly one way, whenever the engine is lost: with its process
killed, and at each step of an engine in memory."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests import waiting
from tests.engine.fake_core_process import FakeCoreOptions
from tests.profiles import SCALE, seeds
from tests.server.fake_serve import FakeServeOptions, FakeServer, fake_server
from tests.server.load import get_json, leftovers, until_ready
from tests.server.running import MODEL, RunningServer

NUM_LOST = 40
"""Runs of each route with the engine in memory."""
NUM_KILLS = 2
"""Runs of each route with a process; twenty times as many in a soak: 200 of all routes."""
MOST_DEATHS = 3
"""A request is asked again after two deaths, and fails at the third one."""
CORE = FakeCoreOptions(
    step_s=0.01, num_blocks=2048, block_size=16, max_num_seqs=16, max_num_batched_tokens=256,
    max_model_len=512,
)  # fmt: skip

STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/inference/v1/generate": {"token_ids": [5, 6, 7]},
}
REFUSALS = (500, 503, 529)
DONE = "data: [DONE]"


def asked(route: str, seed: int, num_tokens: int) -> dict[str, Any]:
    body = {**STREAMS[route], "stream": True}
    limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    sampling = {limit: num_tokens, "seed": seed}
    if route == "/inference/v1/generate":
        return {**body, "sampling_params": sampling}
    return {**body, **sampling}


def ending(route: str, reply: httpx.Response) -> str:
    """Return the ending of a stream, which comes once and last; "refused" if the stream never
    began."""
    if reply.status_code != 200:
        assert reply.status_code in REFUSALS and reply.json()["error"]["message"], reply.text
        return "refused"
    data = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    is_marked = route != "/v1/messages"
    marks = [line for line in data if line == DONE]
    events = [json.loads(line[6:]) for line in data if line != DONE]
    if route in ("/v1/messages", "/v1/responses"):
        last = ("message_stop", "error", *(f"response.{e}" for e in ENDS))
        ends = [event["type"] for event in events if event["type"] in last]
        assert len(ends) == 1 and events[-1]["type"] == ends[0], reply.text
        assert len(marks) == is_marked and (not is_marked or data[-1] == DONE), reply.text
        return ends[0]
    ends = ["error" for event in events if "error" in event] + marks
    assert len(ends) == 1, reply.text
    assert data[-1] == DONE if marks else "error" in events[-1], reply.text
    return "done" if marks else "error"


ENDS = ("completed", "incomplete", "failed")


@pytest.mark.parametrize("route", STREAMS)
def test_an_engine_is_lost_at_any_step(server: RunningServer, route: str) -> None:
    """Or not at all: the last event is the one that says how it ended."""
    choose = random.Random(7)
    seen: set[str] = set()
    with waiting.PatientClient(base_url=server.url) as http:
        for run in range(NUM_LOST):
            after = choose.randrange(32)
            server.call(lambda after=after: setattr(server.client, "fail_after", after))
            seen.add(ending(route, http.post(route, json=asked(route, run, 24))))
    server.call(lambda: setattr(server.client, "fail_after", None))
    server.wait_until_idle()
    assert len(seen - {"refused"}) >= 2, "both ends are seen"
    assert waiting.get(f"{server.url}/health").status_code == 200


def test_a_core_is_killed_at_any_moment(record_property: Callable[[str, object], None]) -> None:
    """A stream on each route; the process of the core is killed once to three times meanwhile."""
    found: Counter[str] = Counter()
    options = FakeServeOptions(CORE, restarts_at_once=True)

    async def work(server: FakeServer) -> None:
        base = f"http://127.0.0.1:{server.port}"
        async with waiting.PatientAsyncClient(base_url=base) as http:
            for run in seeds(NUM_KILLS):
                await until_ready(server.port)
                found.update(await _one_run(server, http, run))
        await until_ready(server.port)
        assert not any((await leftovers(server.port)).values())

    with fake_server(options, is_forked=True) as server:
        asyncio.run(asyncio.wait_for(work(server), 240 * SCALE))
    for name, count in sorted(found.items()):
        record_property(name, count)
    assert sum(found.values()) == len(STREAMS) * len(seeds(NUM_KILLS))
    assert sum(count for name, count in found.items() if "refused" not in name), "some began"


async def _one_run(server: FakeServer, http: httpx.AsyncClient, run: int) -> list[str]:
    """The ends of streams on all routes, with the routes."""
    choose = random.Random(run)
    streams = [
        asyncio.create_task(http.post(route, json=asked(route, run, choose.randrange(8, 120))))
        for route in STREAMS
    ]
    for _ in range(1 + run % MOST_DEATHS):
        await asyncio.sleep(choose.random() * 0.4)
        await _kill_core(server)
    replies = await asyncio.gather(*streams)
    return [
        f"{route} {ending(route, reply)}" for route, reply in zip(STREAMS, replies, strict=True)
    ]


async def _kill_core(server: FakeServer) -> None:
    """And wait for the next one: the server gives up after several that never became ready."""
    before = (await get_json(server.port, "/admin/status"))["restarts"]
    for core in server.descendants():
        os.kill(core, signal.SIGKILL)
    while (await get_json(server.port, "/admin/status"))["restarts"] == before:
        await asyncio.sleep(0.01)
    await until_ready(server.port)
