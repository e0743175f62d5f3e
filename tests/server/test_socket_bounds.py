"""Bounds of the memory that a client of a WebSocket may take on the server, and of the time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from quire.server.http.body import BytesInFlight
from quire.server.http.protocol import limited_protocol
from quire.server.http.server import uvicorn_config
from quire.server.http.websocket import WEBSOCKET, WebSocket
from quire.server.requests.limits import Limits
from quire.server.requests.places import Fields
from quire.server.responses.socket import LocalResponses, SocketResponse
from quire.server.responses.store import StoredResponse
from quire.server.settings import ServerSettings
from tests.server.socket_client import masked
from tests.waiting import WAIT_S, in_a_loop

_OFFER = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@dataclass
class Opened:
    """Both ends of a connection, in one event loop. A write of the server that its client does not
    read waits in the transport soon."""

    client: socket.socket
    protocol: HttpToolsProtocol
    in_flight: BytesInFlight
    served: list[WebSocket] = field(default_factory=list[WebSocket])

    @property
    def server(self) -> WebSocket:
        return self.served[0]

    async def say(self, *frames: bytes) -> None:
        """Send frames at once."""
        await asyncio.get_running_loop().sock_sendall(self.client, b"".join(frames))

    async def frame(self) -> tuple[int, bytes] | None:
        """Opcode and data of the server's next frame; None if it has ended the connection."""
        head = await self._take(2)
        if not head:
            return None
        size = head[1]
        if size >= 126:
            size = int.from_bytes(await self._take(2 if size == 126 else 8))
        return head[0] & 15, await self._take(size)

    async def _take(self, count: int) -> bytes:
        loop, found = asyncio.get_running_loop(), b""
        while len(found) < count and (
            data := await loop.sock_recv(self.client, count - len(found))
        ):
            found += data
        return found

    async def frames(self) -> list[tuple[int, bytes]]:
        """All frames that come before the server ends the connection."""
        found: list[tuple[int, bytes]] = []
        while (each := await self.frame()) is not None:
            found.append(each)
        return found

    async def error(self, *frames: bytes) -> Any:
        """The error that the server sends for a message, perhaps behind pings."""
        await self.say(*frames)
        while (found := await self.frame()) == (9, b""):
            pass
        assert found is not None and found[0] == 1
        return json.loads(found[1])["error"]

    async def code(self) -> int:
        """The reason of the server for the end, which must come with its next frame."""
        ((opcode, data),) = await self.frames()
        assert opcode == 8
        return int.from_bytes(data)


@contextlib.asynccontextmanager
async def opened(
    limits: Limits | None = None, answer: ASGIApp | None = None
) -> AsyncIterator[Opened]:
    """answer: makes the answers to messages; without it nobody takes them."""
    settings = ServerSettings(disable_access_log=True, limits=limits or Limits())
    found, in_flight = list[WebSocket](), BytesInFlight(settings.limits)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope["extensions"][WEBSOCKET])
        if answer is None:
            await found[0].accept(send, in_flight)
            await found[0].lost.wait()
        else:
            scope["state"] = {"tenant": "", "weight": 1.0}
            response = SocketResponse(answer, found[0], settings.limits, in_flight)
            await response(scope, receive, send)

    loop = asyncio.get_running_loop()
    client, server = socket.socketpair()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.setblocking(False)
    protocol = limited_protocol(settings.limits)(uvicorn_config(app, settings), ServerState(), {})
    with client:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, server)
        await loop.sock_sendall(client, _OFFER)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await loop.sock_recv(client, 1)
        async with asyncio.timeout(WAIT_S):
            yield Opened(client, protocol, in_flight, found)
        if not transport.is_closing():
            transport.abort()
        await found[0].lost.wait()
    assert not in_flight.num_bytes


@in_a_loop
async def test_pongs_wait_for_a_slow_reader() -> None:
    """Fault: a client that reads nothing has the server hold a pong for each of its pings."""
    async with opened() as each:
        for _ in range(100):
            await each.say(*[masked(9, b"x" * 120)] * 100)
        await each.say(masked(1, b"{}"))
        assert await each.server.receive() == b"{}"
        assert each.protocol.transport.get_write_buffer_size() < 2**17


@in_a_loop
async def test_nothing_follows_the_end() -> None:
    """Fault: the server answers messages behind a client's end, behind its own end."""
    async with opened() as each:
        await each.server.send(b"y" * 30_000)
        await each.say(masked(8, b""), masked(9, b"there?"), masked(1, b"{}"), masked(2, b""))
        assert [opcode for opcode, _ in await each.frames()] == [1, 8]


@in_a_loop
async def test_messages_count_as_bodies() -> None:
    """Fault: the halves of messages of many connections fill the memory."""
    limits = Limits(max_body_bytes_in_flight=1000)
    for frame in (masked(1, b"x" * 2000)[:1500], masked(1, b"x" * 1500, first_bits=0)):
        async with opened(limits) as each:
            await each.say(frame)
            assert await each.code() == 1013
    async with opened(limits) as each:
        for _ in range(3):
            await each.say(masked(1, b"x" * 900))
            assert len(await each.server.receive() or b"") == 900


@in_a_loop
async def test_a_message_must_arrive_in_time() -> None:
    """Between two messages there is no limit."""
    async with opened(Limits(body_timeout_s=0.2)) as each:
        await each.say(masked(1, b"{}"))
        assert await each.server.receive() == b"{}"
        await asyncio.sleep(0.3)
        await each.say(masked(1, b"{", first_bits=0), masked(9, b""))
        assert await each.frames() == [(10, b""), (8, (1008).to_bytes(2))]


@in_a_loop
async def test_few_messages_may_wait() -> None:
    """For the answer to the one before them."""
    async with opened() as each:
        receiving = asyncio.create_task(each.server.receive())
        await asyncio.sleep(0)
        await each.say(*(masked(1, text) for text in (b"1", b"2", b"3", b"4", b"5")))
        got = [await receiving, *[await each.server.receive() for _ in range(4)]]
        assert got == [b"1", b"2", b"3", b"4", b"5"]
        await each.say(*(masked(1, b"6") for _ in range(5)))
        assert await each.code() == 1013
        assert await each.server.receive() is None


@in_a_loop
async def test_who_leaves_is_noticed_while_messages_wait() -> None:
    """Fault: the engine computes for nobody."""
    for count in range(1, 6):
        async with opened() as each:
            await each.say(*[masked(1, b"{}")] * count)
            each.client.shutdown(socket.SHUT_RDWR)
            async with asyncio.timeout(WAIT_S):
                await each.server.lost.wait()


def test_a_long_conversation_is_let_go() -> None:
    """And so is the one before it, which nothing can go on from."""
    local = LocalResponses(max_bytes=200)
    for size, is_kept in ((10, True), (1000, False)):
        item: Fields = {"type": "message", "content": "x" * size}
        before = sys.getrefcount(item)
        local.keep(StoredResponse(f"resp_{size}", None, {"output": []}, [item]), [item])
        assert (local.conversation(f"resp_{size}") is not None) == is_kept
        assert (sys.getrefcount(item) > before) == is_kept


CREATE = masked(1, b'{"type": "response.create"}')


async def teapot(scope: Scope, receive: Receive, send: Send) -> None:
    error = {"message": "short and stout"}
    await JSONResponse({"error": error}, 418)(scope, receive, send)


@in_a_loop
async def test_the_shape_of_a_message_is_checked_first() -> None:
    """Fault: something is built from a message before its bounds are known."""
    async with opened(answer=teapot) as each:
        for message, words in (
            (b"[" * 100 + b"]" * 100, "max_json_depth"),
            (b'{"' + b"x" * 300 + b'": 1}', "max_json_key_bytes"),
            (b'{"type": "response.create", "previous_response_id": [5]}', "previous_response_id"),
            (b'{"type": "response.create"}', "short and stout"),
        ):
            assert words in (await each.error(masked(1, message)))["message"]


@in_a_loop
async def test_others_have_a_turn_between_two_messages() -> None:
    """Fault: messages that are refused at once keep the event loop."""
    turns: list[str] = []

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        turns.append("a message")
        asyncio.get_running_loop().call_soon(turns.append, "another task")
        await teapot(scope, receive, send)

    async with opened(answer=noted) as each:
        await each.error(CREATE)
        await each.error(CREATE, CREATE)
        await each.frame()
    assert turns == ["a message", "another task"] * 3


@in_a_loop
async def test_a_server_that_ends_ends_its_answer_first() -> None:
    """And takes no message after it. Fault: the connection is cut amid an answer."""
    started, may_end = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        await may_end.wait()
        await teapot(scope, receive, send)

    async with opened(answer=slow) as each:
        await each.say(CREATE, CREATE)
        await started.wait()
        each.protocol.shutdown()
        may_end.set()
        (kind, _), end = await each.frames()
        assert kind == 1 and end == (8, (1001).to_bytes(2))
    async with opened(answer=slow) as each:
        await each.error(CREATE)
        each.protocol.shutdown()
        assert await each.code() == 1001


@in_a_loop
async def test_a_silent_server_says_that_it_is_there() -> None:
    """Fault: a proxy cuts the connection while a long prompt is computed."""
    async with opened(Limits(sse_keep_alive_s=0.05), answer=teapot) as each:
        for _ in range(2):
            assert await each.frame() == (9, b"")
            await each.say(masked(10, b""))
        assert (await each.error(CREATE))["message"] == "short and stout"
