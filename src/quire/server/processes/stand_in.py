"""Answers on the port until a front does: probes, and 503 with the phase for other requests.

It imports nothing of a front, which would take longer than a client waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from types import TracebackType

import msgspec

from quire.server.http.tls import tls_context
from quire.server.processes.listening import BACKLOG
from quire.server.readings.short_status import PROBES, ShortStatus
from quire.server.requests.errors import ErrorReply
from quire.server.settings import ServerSettings

__all__ = ["StandIn"]

RETRY_S = 2.0
LINGER_S = 2.0
"""Seconds in which a client may go on sending, unread, so that it can read the answer."""


class StandIn:
    """A context that answers on each socket until that is handed to a front."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises ConfigError if the TLS files cannot be read."""
        self._limits = settings.limits
        self._root_path = settings.root_path
        self._tls = tls_context(settings)
        self._opened = time.monotonic()
        self._servers: dict[int, asyncio.Server] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self.status: Callable[[], ShortStatus] = self._importing
        """Status to report. Keep it up to date."""

    async def open(self, listeners: Iterable[socket.socket]) -> None:
        """Answer on these sockets. One socket may occur several times."""
        for listener in listeners:
            if listener.fileno() not in self._servers:
                self._servers[listener.fileno()] = await asyncio.start_server(
                    self._answer,
                    sock=listener.dup(),  # which is closed with the server
                    ssl=self._tls,
                    limit=self._limits.max_header_bytes,
                    backlog=BACKLOG,
                )

    def leave(self, listener: socket.socket) -> None:
        """Hand a socket to the front that listens there now. Accepted connections are still
        answered."""
        server = self._servers.pop(listener.fileno(), None)
        if server is not None:
            server.close()

    async def __aenter__(self) -> StandIn:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for answering in self._answering:
            answering.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def _importing(self) -> ShortStatus:
        return ShortStatus("starting", "importing", round(time.monotonic() - self._opened, 1))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of a connection, its only one."""
        task = asyncio.current_task()
        assert task is not None, "streams are handled in tasks"
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        # A client that breaks its connection concerns nobody else.
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            if len(self._answering) <= self._limits.max_connections:
                await self._exchange(reader, writer)
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._limits.header_timeout_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        async with asyncio.timeout(LINGER_S):
            writer.write(self._response(head))
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            # Closing a connection with unread bytes resets it, and the answer would be lost.
            while await reader.read(2**16):
                pass

    def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        path = path.removeprefix(self._root_path)
        shown = self.status()
        if path in PROBES:
            is_well = path == "/livez" and shown.status != "dead"
            status, body = (200 if is_well else 503), msgspec.json.encode(shown)
            headers = {"content-type": "application/json"}
        else:
            message = f"The server is {shown}. Try again soon."
            reply = ErrorReply(503, message, retry_after_s=RETRY_S).at(path)
            status, body, headers = reply.status, reply.body, reply.headers
        lines = [f"HTTP/1.1 {status} {'OK' if status == 200 else 'Service Unavailable'}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {len(body)}", "connection: close", "", ""]
        return "\r\n".join(lines).encode() + (b"" if method == b"HEAD" else body)
