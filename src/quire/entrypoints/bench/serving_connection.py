"""HTTP/1.1 for a load generator: little work per chunk, so that it does not become what is
measured. `httptools` parses; a connection serves one request at a time and is used again."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast

import httptools

from quire.entrypoints.client import ServerAddress

__all__ = ["ConnectionPool", "OnBody"]

OnBody = Callable[[int, bytes, float], None]
"""Called with status, a part of the body, and when it arrived (`time.perf_counter`; the clock of
uvloop has whole milliseconds only)."""


class ConnectionPool:
    """Connections to one server, opened when none is idle."""

    def __init__(self, address: ServerAddress, headers: dict[str, str]) -> None:
        self._address = address
        self._idle: list[_Connection] = []
        given = {"Host": f"{address.host}:{address.port}", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._tls = ssl.create_default_context() if address.scheme == "https" else None

    async def post(self, path: str, body: bytes, on_body: OnBody) -> int:
        """Send, and wait until the response has ended. The status. OSError if it was lost."""
        head = f"POST {self._address.path}{path} HTTP/1.1\r\n{self._headers}"
        message = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, message, on_body)
            except ConnectionError:
                # The server may close an idle connection while a request is on its way.
                if connection.has_answered:
                    raise
        return await self._exchange(await self._connect(), message, on_body)

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        at = self._address
        _, protocol = await loop.create_connection(
            lambda: _Connection(loop), at.host, at.port, ssl=self._tls
        )
        return protocol

    async def _exchange(self, connection: _Connection, message: bytes, on_body: OnBody) -> int:
        try:
            status = await connection.exchange(message, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return status


class _Connection(asyncio.Protocol):
    """The names of its callbacks are those of asyncio and of httptools."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._on_body: OnBody | None = None
        self._ended: asyncio.Future[int] | None = None
        self._now = 0.0
        self.has_answered = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, message: bytes, on_body: OnBody) -> int:
        """Send a request and wait for the end of its response; the status."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self.has_answered = False
        self._parser = httptools.HttpResponseParser(self)
        self._on_body, self._ended = on_body, self._loop.create_future()
        self._transport.write(message)
        return await self._ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"the response is no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(ConnectionResetError(str(exc or "the server closed the connection")))

    def on_body(self, body: bytes) -> None:
        assert self._on_body is not None
        self._on_body(self._parser.get_status_code(), body, self._now)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._end(self._parser.get_status_code())

    def _end(self, result: int | Exception) -> None:
        """Tell the one who waits, if somebody still does."""
        ended, self._ended = self._ended, None
        if ended is None or ended.done():
            return
        if isinstance(result, Exception):
            ended.set_exception(result)
        else:
            ended.set_result(result)
