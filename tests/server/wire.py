"""A connection to the server without a socket: segments reach its protocol exactly as given, and
what comes back is read as strictly as a client may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI
from uvicorn.server import ServerState

from quire.engine.model_front import ModelFront
from quire.server.app import create_app
from quire.server.generation.backend import Backend, ServedModel
from quire.server.http.server import uvicorn_config
from quire.server.settings import ServerSettings
from tests.server.in_memory import InMemoryClient
from tests.waiting import WAIT_S

__all__ = ["Connection", "Reply", "Wire", "replies_of"]


@dataclass
class Reply:
    """body: bytes without their framing. is_open_ended: the body ends with the connection."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes = b""
    is_open_ended: bool = False


class Wire:
    """The application over the engine in memory, and the loop in which both live."""

    def __init__(
        self,
        front: ModelFront,
        settings: ServerSettings | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self.runner = asyncio.Runner(loop_factory=loop_factory)
        self.client = InMemoryClient()
        backend = Backend()
        backend.serve(self.client)
        backend.set_model(ServedModel(("bundled",), "bundled", 1700000000, front, 0))
        settings = settings or ServerSettings(disable_access_log=True)
        self.app: FastAPI = create_app(settings, backend)
        self.config = uvicorn_config(self.app, settings)

    def exchange(self, segments: Iterable[bytes], methods: Iterable[str] = ()) -> Connection:
        """Send all, and wait until nothing is answered any more. methods: see `replies_of`."""

        async def talk() -> Connection:
            connection = Connection(self)
            for segment in segments:
                connection.send(segment)
                await asyncio.sleep(0)
            await connection.wait(lambda: not connection.state.tasks)
            connection.end()
            return connection

        found = self.runner.run(asyncio.wait_for(talk(), WAIT_S))
        found.replies = replies_of(bytes(found.received), found.is_closed, methods)
        return found


class Connection(asyncio.Transport):
    """received: all bytes that the server wrote. is_closed: the server closed it. num_unsent:
    returns the bytes that the client has not taken."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.received = bytearray()
        self.is_closed = False
        self.num_unsent: Callable[[], int] = lambda: 0
        self._has_ended = self._is_half_closed = False
        self.state = ServerState()
        self.state.default_headers = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")]
        self.replies: list[Reply] = []
        make = cast("Callable[..., Any]", wire.config.http_protocol_class)
        self.protocol = make(config=wire.config, server_state=self.state, app_state={})
        self.protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        if data and not self.is_closed:
            self.protocol.data_received(data)

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds and the connection knows of its end, if that has come."""
        await asyncio.sleep(0)
        while not condition():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)

    def end(self) -> None:
        """End the connection from the client's side, if it is still open."""
        self._has_ended = True
        if not self.is_closed:
            self.protocol.connection_lost(None)

    # --- what the server does with it -----------------------------------------------------------

    def write(self, data: Any) -> None:
        assert not (self.is_closed or self._is_half_closed), "written after the end"
        self.received += data

    def close(self) -> None:
        if not (self.is_closed or self._has_ended):
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The client, which reads all, sees the end and leaves."""
        self._is_half_closed = True
        asyncio.get_running_loop().call_soon(self.close)

    def get_write_buffer_size(self) -> int:
        return self.num_unsent()

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)}.get(name, default)


def replies_of(data: bytes, is_closed: bool, methods: Iterable[str] = ()) -> list[Reply]:
    """Return the responses in a server's bytes, each of which must be whole. methods: methods of
    the requests, if some were HEAD, which has no body."""
    replies: list[Reply] = []
    asked = iter(methods)
    while data:
        head, separator, data = data.partition(b"\r\n\r\n")
        assert separator, f"half a head: {head!r}"
        first, *lines = head.split(b"\r\n")
        version, status, _ = first.split(b" ", 2)
        assert version == b"HTTP/1.1"
        headers = {name: value for name, _, value in (line.partition(b": ") for line in lines)}
        assert len(headers) == len(lines), "a header came twice"
        reply = Reply(int(status), headers)
        if reply.status >= 200:
            data = _take_body(reply, data, is_closed, next(asked, "GET"))
            check_error(reply)
        replies.append(reply)
    return replies


def _take_body(reply: Reply, data: bytes, is_closed: bool, method: str) -> bytes:
    """Take the body, and return the bytes behind it."""
    assert b"date" in reply.headers
    if method == "HEAD":
        return data
    if reply.headers.get(b"transfer-encoding") == b"chunked":
        assert b"content-length" not in reply.headers
        while True:
            size, _, data = data.partition(b"\r\n")
            end = int(size, 16)
            reply.body += data[:end]
            assert data[end : end + 2] == b"\r\n", "a chunk is cut off"
            data = data[end + 2 :]
            if not end:
                return data
    if b"content-length" in reply.headers:
        length = int(reply.headers[b"content-length"])
        assert len(data) >= length, "a body is cut off"
        reply.body = data[:length]
        return data[length:]
    assert is_closed and reply.headers[b"connection"] == b"close"
    reply.body, reply.is_open_ended = data, True
    return b""


def check_error(reply: Reply) -> None:
    """Whatever refuses a request does it in the shape that clients read."""
    if reply.status >= 400 and reply.body:
        assert json.loads(reply.body)["error"]["code"] == reply.status
