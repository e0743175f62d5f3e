"""What a client of a WebSocket may make the server hold, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from quire.server.http.protocol import limited_protocol
from quire.server.http.server import uvicorn_config
from quire.server.http.websocket import WEBSOCKET, WebSocket
from quire.server.requests.limits import Limits
from quire.server.settings import ServerSettings
from tests.server.socket_client import masked
from tests.waiting import WAIT_S, in_a_loop

_OFFER = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@dataclass
class Opened:
    """Both ends of a connection whose server does nothing but accept it, in one event loop. A
    write of the server that its client does not read waits in `transport` soon."""

    client: socket.socket
    protocol: HttpToolsProtocol
    served: list[WebSocket] = field(default_factory=list[WebSocket])

    @property
    def server(self) -> WebSocket:
        return self.served[0]

    async def say(self, *frames: bytes) -> None:
        """Send frames at once."""
        await asyncio.get_running_loop().sock_sendall(self.client, b"".join(frames))

    async def frames(self) -> list[tuple[int, bytes]]:
        """Opcodes and data of all frames that come before the server ends the connection."""
        held, found = b"", list[tuple[int, bytes]]()
        while data := await asyncio.get_running_loop().sock_recv(self.client, 2**16):
            held += data
        while held:
            start, size = 2, held[1]
            if size >= 126:
                start += 2 if size == 126 else 8
                size = int.from_bytes(held[2:start])
            found.append((held[0] & 15, held[start : start + size]))
            held = held[start + size :]
        return found

    async def code(self) -> int:
        """The reason of the server for the end, which must come with its next frame."""
        ((opcode, data),) = await self.frames()
        assert opcode == 8
        return int.from_bytes(data)


@contextlib.asynccontextmanager
async def opened(limits: Limits | None = None) -> AsyncIterator[Opened]:
    settings = ServerSettings(disable_access_log=True, limits=limits or Limits())
    found: list[WebSocket] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope["extensions"][WEBSOCKET])
        await found[0].accept(send)
        await found[0].lost.wait()

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
            yield Opened(client, protocol, found)
        if not transport.is_closing():
            transport.abort()
        await found[0].lost.wait()


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
    """Fault: what comes behind a client's end is answered behind the server's."""
    async with opened() as each:
        await each.server.send(b"y" * 30_000)
        await each.say(masked(8, b""), masked(9, b"there?"), masked(1, b"{}"), masked(2, b""))
        assert [opcode for opcode, _ in await each.frames()] == [1, 8]
