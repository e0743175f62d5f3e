"""Requests that nobody would send by mistake, at the ASGI level, where thousands fit into seconds:
none makes the server fail, say too much, say nothing, or hold on to anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.model_front import ModelFront
from quire.server.app import create_app
from quire.server.generation.backend import Backend, ServedModel
from quire.server.settings import ServerSettings
from tests.profiles import machine_settings
from tests.server.in_memory import InMemoryClient
from tests.waiting import WAIT_S

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models",
    "/v1/models/bundled", "/livez", "/readyz", "/admin/requests", "/metrics", "/load", "/nowhere",
)  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BODIES: tuple[dict[str, Any], ...] = (
    {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2},
    {**CHAT, "logprobs": True, "top_logprobs": 3, "stop": ["a", "b"], "seed": 7},
    {**CHAT, "chat_template_kwargs": {"a": 1}, "documents": [{"text": "d"}], "tools": None},
    {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 2, "prompt_logprobs": 1},
    {"prompt": [[1, 2], [3]], "max_tokens": 1, "truncate_prompt_tokens": 1, "stream": True},
    {"prompt": "x", "max_tokens": 3, "logit_bias": {"5": -100}, "allowed_token_ids": [1, 2]},
    {"messages": CHAT["messages"], "return_token_strs": True},
    {"tokens": [1, 2, 3]},
)
PIECES = (
    b"\x00", b"\xff", b"\\u0000", b"\\ud800", b'"', b"{", b"}", b"[", b"]", b",", b":", b"-",
    b"1e999", b"NaN", b"null", b"true", b"9" * 400, b"-1", b"[" * 100, b'"n":',
    b'"stream":true,', b"\\",
)  # fmt: skip


@dataclass
class Answer:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    num_starts: int = 0
    is_complete: bool = False


class Site:
    """The application over the engine in memory, and the loop in which both live."""

    def __init__(self, front: ModelFront) -> None:
        self.runner = asyncio.Runner()
        self.client = InMemoryClient()
        backend = Backend()
        backend.serve(self.client)
        backend.set_model(ServedModel(("bundled",), "bundled", 1700000000, front, 0))
        self.app = create_app(ServerSettings(disable_access_log=True), backend)

    def ask(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], chunks: list[bytes]
    ) -> Answer:
        return self.runner.run(asyncio.wait_for(self._ask(method, path, headers, chunks), WAIT_S))

    async def _ask(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], chunks: list[bytes]
    ) -> Answer:
        answer, waiting = Answer(), iter(chunks)
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": headers, "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            chunk = next(waiting, None)
            if chunk is not None:
                return {"type": "http.request", "body": chunk, "more_body": True}
            if not ended:
                ended.append(True)
                return {"type": "http.request", "body": b"", "more_body": False}
            return await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.num_starts += 1
                answer.status, answer.headers = message["status"], dict(message["headers"])
            else:
                answer.body += message.get("body", b"")
                answer.is_complete = not message.get("more_body", False)

        ended: list[bool] = []
        await self.app(scope, receive, send)
        while self.client.num_unfinished or self.client.engine.core.has_unfinished:
            await asyncio.sleep(0)
        return answer


@pytest.fixture(scope="module")
def site(front: ModelFront) -> Iterator[Site]:
    found = Site(front)
    with found.runner:
        yield found


def check(site: Site, answer: Answer) -> None:
    assert answer.num_starts == 1 and answer.is_complete
    assert answer.status < 500, (answer.status, answer.body)
    if answer.status >= 400:
        assert len(answer.body) <= 2048
        assert json.loads(answer.body)["error"]["message"]
    elif answer.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        assert answer.body.count(b"data: [DONE]\n\n") + answer.body.count(b'data: {"error":') == 1
    assert site.client.stats.num_used_blocks == 0


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A body that was right, and then was cut, spliced and sprinkled with what hurts parsers."""
    body = bytearray(json.dumps(draw(st.sampled_from(BODIES))).encode())
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(body)))
        until = min(len(body), at + draw(st.integers(0, 12)))
        kind = draw(st.sampled_from(("insert", "replace", "delete", "repeat", "truncate")))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=6))
        if kind == "truncate":
            del body[at:]
        elif kind == "repeat":
            body[at:at] = bytes(body[at:until]) * 3
        else:
            body[at : at if kind == "insert" else until] = b"" if kind == "delete" else piece
    return bytes(body)


HEADER_NAMES = (
    b"x-request-id", b"authorization", b"x-api-key", b"accept", b"content-length", b"origin",
    b"content-encoding", b"cookie", b"expect", b"x-forwarded-for", b"host",
)  # fmt: skip
HEADER_VALUES = st.binary(max_size=40) | st.sampled_from((b"localhost", b"gzip", b"-1", b"9" * 30))
HEADERS = st.lists(st.tuples(st.sampled_from(HEADER_NAMES), HEADER_VALUES), max_size=3)
KIND = (b"content-type", b"application/json")
HOST = (b"host", b"localhost")


def split(body: bytes, cuts: list[int]) -> list[bytes]:
    """In pieces, empty ones among them."""
    places = sorted(cut % (len(body) + 1) for cut in cuts)
    return [body[start:end] for start, end in zip([0, *places], [*places, len(body)], strict=True)]


@machine_settings(400)
@given(
    path=st.sampled_from(PATHS[:4]),
    body=mutated() | st.binary(max_size=60),
    cuts=st.lists(st.integers(0, 400), max_size=4),
)
def test_no_body_makes_it_fail(site: Site, path: str, body: bytes, cuts: list[int]) -> None:
    check(site, site.ask("POST", path, [HOST, KIND], split(body, cuts)))


@machine_settings(150)
@given(
    method=st.sampled_from(("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "\x00")),
    path=st.sampled_from(PATHS) | st.text(max_size=30).map(lambda text: "/" + text),
    headers=HEADERS,
    body=mutated(),
)
def test_no_head_makes_it_fail(
    site: Site, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    answer = site.ask(method, path, [HOST, KIND, *headers], [body])
    assert answer.num_starts == 1 and answer.is_complete
    assert answer.status < 500, (answer.status, answer.body)
    assert len(answer.headers[b"x-request-id"]) <= 128
    assert b"\n" not in answer.headers[b"x-request-id"]
