"""When a stream starts, what keeps it alive, and what may still be refused as an ordinary error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from quire.engine.clients.request_stream import RequestStream
from quire.engine.model_front import ModelFront
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams
from quire.server.generation.follow import NeverFull
from quire.server.generation.service import Generation
from quire.server.generation.waiting import Party, WaitingRoom
from quire.server.http.events import EventSink, EventStream
from quire.server.readings.metrics import ServerMetrics
from quire.server.readings.timeline import Timeline
from quire.server.readings.trace_recorder import TraceRecorder
from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from quire.text.rendering import RenderedPrompt
from tests import waiting
from tests.server.in_memory import InMemoryClient
from tests.server.running import RunningServer, remembered, running_server
from tests.waiting import VirtualTime

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
COMMENT = b": keep-alive\n\n"
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "n": 3, "logprobs": True}),
    (TEXT, {"prompt": "hi"}),
    (TEXT, {"prompt": ["hi", [1, 2, 3], "ho" * 2000], "n": 2, "truncate_prompt_tokens": 100}),
    (TEXT, {"prompt": "hi", "use_beam_search": True, "n": 2}),
]
LONG = "word " * 500
"""Rendered in a thread, while others get their tokens."""
CUT = {"truncate_prompt_tokens": 250}


@pytest.fixture(scope="module")
def small(front: ModelFront) -> Iterator[RunningServer]:
    """Holds less than its limits let requests ask for."""
    limits = Limits(
        sse_keep_alive_s=0.02, max_beam_width=128, max_queue_requests=4, max_queue_tokens=2000
    )
    settings = ServerSettings(disable_access_log=True, limits=limits)
    with running_server(front, settings, InMemoryClient(num_blocks=30)) as found:
        yield found


def events_of(body: bytes) -> list[Any]:
    """The data of all events, without comments."""
    data = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def texts_of(body: bytes) -> dict[int, str]:
    """Return the texts by index of the choice."""
    found: dict[int, str] = {}
    for event in events_of(body)[:-1]:
        for choice in event["choices"]:
            text = choice["delta"]["content"] if "delta" in choice else choice["text"]
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


@pytest.mark.parametrize(("path", "fields"), ASKED)
def test_it_starts_before_its_first_token(
    front: ModelFront, path: str, fields: dict[str, Any]
) -> None:
    """Status, headers and comments come while the engine has not even planned it."""
    limits = Limits(sse_keep_alive_s=0.02)
    with running_server(front, ServerSettings(limits=limits)) as server:
        server.client.paused = True
        body = {"max_tokens": 3, "seed": 1, **fields, "stream": True}
        with waiting.stream("POST", f"{server.url}{path}", json=body) as reply:
            assert reply.status_code == 200
            pieces, received = reply.iter_raw(), b""
            while received.count(COMMENT) < 3:
                received += next(pieces)
            assert received == COMMENT * received.count(COMMENT)
            server.client.paused = False
            received += b"".join(pieces)
        server.wait_until_idle()
        assert events_of(received)[-1] == "[DONE]"
        again = waiting.post(f"{server.url}{path}", json=body)
    assert texts_of(received) == texts_of(again.content)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (TEXT, {"prompt": "hi", "temperature": -1}, 400, "temperature"),
    (TEXT, {"prompt": "hi", "model": "none-such"}, 404, "none-such"),
    (TEXT, {"prompt": "hi", "max_tokens": 600}, 400, "maximum context length"),
    (TEXT, {"prompt": LONG * 2}, 400, "maximum context length"),
    (CHAT, {"messages": [{"role": "user", "content": LONG * 2}]}, 400, "maximum context length"),
    (TEXT, {"prompt": ["hi", LONG * 2]}, 400, "maximum context length"),
    (TEXT, {"prompt": ["hi", [10**9]]}, 400, "outside the vocabulary"),
    (TEXT, {"prompt": "hi", "max_tokens": 500}, 400, "all 30 blocks together hold"),
    (TEXT, {"prompt": ["hi", LONG], **CUT, "max_tokens": 250}, 400, "all 30 blocks together hold"),
    (TEXT, {"prompt": "hi", "use_beam_search": True, "n": 9}, 400, "the beam width is 9"),
    (TEXT, {"prompt": LONG, **CUT, "use_beam_search": True, "n": 8}, 400, "in each of its 8 beams"),
    (TEXT, {"prompt": "hi", "priority": 1}, 400, "priority is 1"),
]  # fmt: skip


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize(("path", "fields", "status", "words"), REFUSED)
def test_what_can_never_be_served_is_an_ordinary_error(
    small: RunningServer,
    path: str,
    fields: dict[str, Any],
    status: int,
    words: str,
    is_paused: bool,
) -> None:
    """Nor does any of it wait for a step: a core is only asked between two."""
    small.client.paused = is_paused
    body = {"max_tokens": 4, **fields, "stream": True}
    reply = waiting.post(f"{small.url}{path}", json=body)
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert words in reply.json()["error"]["message"]
    small.client.paused = False
    small.wait_until_idle()


def test_what_finds_no_room_is_an_ordinary_error(small: RunningServer) -> None:
    small.client.paused = True
    body = {"prompt": "hi", "max_tokens": 4, "stream": True}
    first = waiting.stream("POST", f"{small.url}{TEXT}", json={**body, "prompt": ["hi"] * 3})
    with first as waits:
        assert waits.status_code == 200
        reply = waiting.post(f"{small.url}{TEXT}", json={**body, "prompt": ["hi"] * 2})
        assert reply.status_code == 503 and "max_queue_requests" in reply.text
        assert int(reply.headers["retry-after"]) >= 1
        small.client.paused = False
        waits.read()
    small.wait_until_idle()


def test_more_prompts_than_may_wait_are_served_while_nothing_else_waits(
    small: RunningServer,
) -> None:
    """Otherwise "try again later" would be said for ever."""
    body = {"prompt": ["hi"] * 5, "max_tokens": 2, "stream": True}
    reply = waiting.post(f"{small.url}{TEXT}", json=body)
    assert reply.status_code == 200 and set(texts_of(reply.content)) == set(range(5))
    small.wait_until_idle()


def test_who_leaves_before_the_first_token_takes_the_request_along(small: RunningServer) -> None:
    small.client.paused = True
    prompt = {"prompt": ["hi", LONG], "truncate_prompt_tokens": 50}
    body = {**prompt, "max_tokens": 4, "stream": True}
    with waiting.stream("POST", f"{small.url}{TEXT}", json=body) as reply:
        chunks = reply.iter_raw()  # its end closes the connection
        assert next(chunks) == COMMENT
        small.wait_until_open(2)
    small.client.paused = False
    small.wait_until_idle()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "fields", "words"),
    [
        ({"max_queue_s": 0.05}, {}, "max_queue_s"),
        ({}, {"deadline_s": 1e-9}, "deadline_s"),
    ],
)
def test_what_fails_later_is_the_one_last_event(
    front: ModelFront, limits: dict[str, Any], fields: dict[str, Any], words: str, is_stream: bool
) -> None:
    client = InMemoryClient()
    client.paused = "max_queue_s" in limits
    settings = ServerSettings(limits=Limits(**limits))
    with running_server(front, settings, client) as server:
        body = {"prompt": "hi", "max_tokens": 4, **fields, "stream": is_stream}
        reply = waiting.post(f"{server.url}{TEXT}", json=body)
        assert reply.status_code == (200 if is_stream else 503)
        found = events_of(reply.content) if is_stream else [reply.json()]
        assert len(found) == 1 and found[0]["error"]["code"] == 503
        assert words in found[0]["error"]["message"]
        client.paused = False
        server.wait_until_idle()


def given_up(
    front: ModelFront,
    limits: Limits,
    *news: tuple[float, Callable[[WaitingRoom, RequestStream], None]],
) -> tuple[float, str]:
    """Return the time at which a prompt of 8,000 tokens without an output was given up, and the
    message. news: (second at which it comes, action)."""
    loop, room = VirtualTime(), WaitingRoom(limits)
    prompt, params = RenderedPrompt([5] * 8000), SamplingParams()
    place = room.enter(Party())
    place.hold(8000)
    request = EngineRequest("0", 0, np.array(prompt.token_ids, np.int32), params, seed=0)
    stream = RequestStream(request, lambda _: None)

    async def wait() -> tuple[float, str]:
        timeline = Timeline("0", TEXT, clock=lambda: loop.time())
        generation = Generation(
            stream, prompt, params, front,
            limits=limits, place=place, timeline=timeline, metrics=ServerMetrics(),
            recorder=TraceRecorder(""), known=remembered(timeline, prompt.token_ids),
        )  # fmt: skip
        for at, act in news:
            loop.call_at(at, act, room, stream)
        with pytest.raises(RefusedError) as refused:
            await generation.run(lambda _: None, NeverFull())
        return round(loop.time(), 3), str(refused.value)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(wait())


def _starts(_: WaitingRoom, stream: RequestStream) -> None:
    stream.take_num_cached(0)
    stream.announce()


def _is_slow(room: WaitingRoom, _: RequestStream) -> None:
    room.observe_speed(20.0)


@pytest.mark.parametrize(
    ("limits", "news", "at", "words"),
    [
        (Limits(), [], 60.0, "waited 60 s for the engine (max_queue_s)"),
        (Limits(), [(10.0, _starts)], 300.0, "No token came within 300 s (first_token_timeout_s)"),
        (Limits(), [(10.0, _starts), (40.0, _is_slow)], 800.0, "No token came within 800 s"),
        (Limits(), [(10.0, _starts), (299.0, _is_slow)], 800.0, "No token came within 800 s"),
        (Limits(), [(10.0, _starts), (301.0, _is_slow)], 300.0, "No token came within 300 s"),
        (Limits(max_queue_s=5.0), [(1.0, _is_slow)], 5.0, "waited 5 s"),
        (
            Limits(first_token_timeout_s=9.0),
            [(1.0, _starts), (2.0, _is_slow)],
            9.0,
            "No token came within 9 s",
        ),
    ],
)
def test_a_long_prompt_is_given_the_time_that_it_takes(
    front: ModelFront, limits: Limits, news: list[Any], at: float, words: str
) -> None:
    """Fault: a large model on a CPU never answers a long prompt. The speed is known only when its
    first chunk has been computed, so a limit that is reached is looked at again."""
    found = given_up(front, limits, *news)
    assert found[0] == at and words in found[1]


def written_by(produce: Any, keep_alive_s: float) -> list[tuple[float, bytes]]:
    """All that a stream writes, and when, in seconds of a clock of its own."""
    loop = VirtualTime()
    written: list[tuple[float, bytes]] = []

    async def send(message: Any) -> None:
        written.append((round(loop.time(), 3), message.get("body", b"head")))

    async def receive() -> Any:
        return await loop.create_future()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(EventStream(produce, keep_alive_s)({"type": "http"}, receive, send))
    return written


def test_no_silence_is_longer_than_the_interval() -> None:
    """Fault: a comment only every other time, because an event came since the one before."""

    async def produce(sink: EventSink) -> bytes:
        await asyncio.sleep(40)  # to be rendered, say
        await sink.start()
        for seconds in (1, 31, 14, 16):
            await asyncio.sleep(seconds)
            sink.write(b"data\n\n")
            await sink.flush()
        return b"end"

    comments = [(at, COMMENT) for at in (56, 71, 101)]
    events = [(at, b"data\n\n") for at in (41, 72, 86, 102)]
    expected = sorted([(40, b"head"), *comments, *events, (102, b"end")], key=lambda item: item[0])
    assert written_by(produce, 15) == expected


def test_what_never_starts_is_never_commented() -> None:
    async def produce(sink: EventSink) -> bytes:
        await asyncio.sleep(40)
        raise ValueError

    head, body = written_by(produce, 15)
    assert head == (40, b"head") and json.loads(body[1])["error"]["code"] == 500
