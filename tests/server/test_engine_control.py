"""Routes that pause the engine, let it sleep, and reset its prefix cache."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from quire.base.errors import EngineUnavailableError, RequestError
from quire.engine.model_front import ModelFront
from quire.protocol.control import Inspect, Pause, Report, Resume, Sleep, Wake
from quire.protocol.status import EngineState
from quire.server.settings import ServerSettings
from tests import waiting
from tests.engine.process_harness import hosted, run, until_state
from tests.server.running import RunningServer, running_server

KEY = "k" * 16
ROUTES = ("/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/start_profile")
BODY: dict[str, Any] = {
    "prompt": list(range(300, 341)),
    "max_tokens": 12,
    "ignore_eos": True,
    "seed": 5,
}


@pytest.fixture(scope="module")
def controlled(front: ModelFront) -> Iterator[RunningServer]:
    settings = ServerSettings(enable_engine_control=True, api_key=(KEY,), disable_access_log=True)
    with running_server(front, settings) as server:
        yield server


@pytest.fixture
def http(controlled: RunningServer) -> Iterator[httpx.Client]:
    headers = {"x-api-key": KEY}
    with waiting.PatientClient(base_url=controlled.url, headers=headers) as client:
        yield client
        client.post("/wake_up")
        client.post("/resume")
    controlled.wait_until_idle()


def cached(reply: httpx.Response) -> int:
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", [*ROUTES, "/stop_profile"])
def test_they_are_closed_without_the_switch_and_without_a_key(
    server: RunningServer, controlled: RunningServer, path: str
) -> None:
    assert waiting.post(server.url + path).status_code == 404
    assert waiting.post(controlled.url + path).status_code == 401
    assert waiting.get(controlled.url + "/is_sleeping").status_code == 401
    assert controlled.client.state is EngineState.READY


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_refuses_with_the_reason(http: httpx.Client, level: int) -> None:
    before = http.post("/v1/completions", json=BODY)
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post(f"/sleep?level={level}").json() == {"sleep_level": level, "is_paused": True}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    for path, body in (
        ("/v1/completions", BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/admin/prefixes", {"prompt": [3, 4, 5]}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 503
        assert f"the engine sleeps (level {level})" in reply.json()["error"]["message"]
        assert reply.headers["retry-after"]
    probes = {path: http.get(path).status_code for path in ("/livez", "/health", "/readyz")}
    assert probes == {"/livez": 200, "/health": 200, "/readyz": 503}
    assert http.get("/readyz").json()["status"] == "sleeping"
    assert re.search(r"vllm:engine_sleep_state\{.*\} 1\.0", http.get("/metrics").text)
    assert http.post("/resume").status_code == 400
    assert http.post("/wake_up").json() == {"sleep_level": 0, "is_paused": False}
    after = http.post("/v1/completions", json=BODY)
    assert after.json()["choices"] == before.json()["choices"]
    assert cached(after) == 0


def test_a_kept_stream_continues_to_the_byte(http: httpx.Client) -> None:
    """Chunks differ in their ids and times alone."""
    expected = http.post("/v1/completions", json={**BODY, "max_tokens": 60}).json()
    text = ""
    with http.stream(
        "POST", "/v1/completions", json={**BODY, "max_tokens": 60, "stream": True}
    ) as reply:
        for i, line in enumerate(reply.iter_lines()):
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            text += choices[0]["text"] if choices else ""
            if i == 0:
                assert http.post("/pause?mode=keep").json()["is_paused"]
                assert http.get("/is_paused").json() == {"is_paused": True}
                http.post("/resume")
            if i == 4:
                http.post("/sleep?mode=keep")
                http.post("/wake_up")
    assert text == expected["choices"][0]["text"]


@pytest.mark.parametrize("operation", ["/pause?mode=abort", "/sleep"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "stream"])
def test_what_an_operation_ends_can_be_sent_again(
    controlled: RunningServer, http: httpx.Client, operation: str, path: str
) -> None:
    """Fault: clients got 500, as if the server had a fault."""
    body: dict[str, Any] = {"input": [5] * 30} if path == "/v1/embeddings" else BODY
    route = "/v1/completions" if path == "stream" else path
    controlled.client.paused = True  # the task that runs steps, so that the request stays open
    with ThreadPoolExecutor(1) as pool:
        body = {**body, "stream": True} if path == "stream" else body
        sent = pool.submit(http.post, route, json=body)
        controlled.wait_until_open()
        assert http.post(operation).status_code == 200
        controlled.client.paused = False
        reply = sent.result()
    if path == "stream":
        assert '"code":503' in reply.text and "paused" in reply.text
    else:
        assert (reply.status_code, "retry-after" in reply.headers) == (503, True), reply.text
        assert "paused" in reply.json()["error"]["message"]


def test_requests_that_come_during_a_pause_wait(
    http: httpx.Client, controlled: RunningServer
) -> None:
    expected = http.post("/v1/completions", json=BODY).json()["choices"]
    http.post("/pause?mode=wait")

    async def ask() -> httpx.Response:
        headers = {"x-api-key": KEY}
        async with waiting.PatientAsyncClient(base_url=controlled.url, headers=headers) as client:
            asking = asyncio.ensure_future(client.post("/v1/completions", json=BODY))
            await asyncio.to_thread(controlled.wait_until_open)
            assert not asking.done()
            await client.post("/resume")
            return await asking

    assert asyncio.run(ask()).json()["choices"] == expected


def test_a_reset_forgets(http: httpx.Client) -> None:
    http.post("/v1/completions", json=BODY)
    assert cached(http.post("/v1/completions", json=BODY)) == 32
    for flag in ("", "?reset_running_requests=true"):
        assert http.post("/reset_prefix_cache" + flag).json() == {"success": True}
        assert cached(http.post("/v1/completions", json=BODY)) == 0


@pytest.mark.parametrize(
    "path",
    [
        "/sleep?level=0", "/sleep?level=3", "/sleep?level=one", "/sleep?mode=never",
        "/pause?mode=", "/reset_prefix_cache?reset_running_requests=perhaps",
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused(http: httpx.Client, path: str) -> None:
    reply = http.post(path)
    assert reply.status_code == 400
    assert "Give" in reply.json()["error"]["message"]
    assert http.get("/is_paused").json() == {"is_paused": False}


def test_operations_cross_to_the_process_of_the_core() -> None:
    async def work() -> None:
        async with hosted() as host:
            client = host.client
            assert await client.control(Inspect()) == Report(
                kernels="none: tokens are hashes", kernel_family="fake", numerics="invariant"
            )
            assert (await client.control(Pause("keep"))).is_paused
            assert not (await client.control(Resume())).is_paused
            with pytest.raises(RequestError, match="sleep level is 7"):
                await client.control(Sleep(7))
            assert (await client.control(Sleep(1))).sleep_level == 1
            assert client.status.state is EngineState.SLEEPING  # at once, whatever old beats say
            with pytest.raises(EngineUnavailableError, match="level 1"):
                await client.add(None)  # type: ignore[arg-type]
            assert (await client.control(Wake())).sleep_level == 0
            await until_state(client, EngineState.READY)

    run(work())
