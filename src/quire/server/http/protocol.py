"""HTTP/1.1 connections with the bounds that uvicorn's own lack: on headers, and on slow clients.
And a short way for the bodies of streams."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.requests.errors import ErrorReply
from quire.server.requests.limits import Limits

__all__ = ["STREAM_BODY", "StreamBody", "limited_protocol"]

STREAM_BODY = "quire.stream_body"
"""Key of the `StreamBody` of a request in its `scope["extensions"]`."""


def limited_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """The protocol class for `uvicorn.Config(http=…)`, which makes its instances itself."""

    class LimitedProtocol(_LimitedProtocol):
        bounds = limits

    return LimitedProtocol


class StreamBody:
    """The body of a response whose head was sent through ASGI without a length: pieces of it go to
    the connection without a message per piece, and without a change of tasks."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def is_full(self) -> bool:
        """Whether the client takes less than it is sent."""
        return self._flow.write_paused

    async def drain(self) -> None:
        """Wait while `is_full`; a client that leaves ends that."""
        await self._flow.drain()

    def write(self, data: bytes) -> None:
        """One chunk (RFC 9112, 7.1). Nothing happens if the client has left."""
        if data and not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(data), data))


def _too_many_connections(limits: Limits) -> ASGIApp:
    """Serves connections over the limit: their first request is their last."""
    reply = ErrorReply(
        503,
        f"The server has {limits.max_connections} connections open (max_connections). "
        "Try again soon.",
        retry_after_s=1,
    )
    return Response(reply.body, reply.status, {**reply.headers, "connection": "close"})


class _LimitedProtocol(HttpToolsProtocol):
    bounds: Limits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._in_body = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  as in the base class
        super().connection_made(transport)
        self._start_head_timer()
        if len(self.connections) > self.bounds.max_connections:
            self.app = _too_many_connections(self.bounds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._num_head_bytes += len(data)
        super().data_received(data)
        # Only a head that is not complete yet is refused here; one that is, at the gate.
        if not self._in_body and self._num_head_bytes > self.bounds.max_header_bytes:
            message = (
                f"The headers have more than {self.bounds.max_header_bytes} bytes "
                "(max_header_bytes). Send less."
            )
            self._refuse(ErrorReply(431, message))

    def on_message_begin(self) -> None:
        self._in_body = False
        if self._head_timer is None:
            self._start_head_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._num_head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and cycle.scope is self.scope:  # None for a request to upgrade
            cast("Any", self.scope)["extensions"] = {STREAM_BODY: StreamBody(cycle)}

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None
            # The body's last bytes ended the wait for the next request.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A request that was refused may still send its body, which nobody reads: not for ever.
        if self._in_body and cast("Any", self.cycle).response_complete:
            self._rest_timer = self.loop.call_later(
                self.bounds.body_timeout_s, self.transport.abort
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(
                self.bounds.stalled_write_timeout_s, self.transport.abort
            )

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _start_head_timer(self) -> None:
        def expire() -> None:
            self._head_timer = None
            message = (
                f"The headers did not arrive within {self.bounds.header_timeout_s:g} s "
                "(header_timeout_s)."
            )
            self._refuse(ErrorReply(408, message))

        self._head_timer = self.loop.call_later(self.bounds.header_timeout_s, expire)

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = self._rest_timer = None

    def _refuse(self, reply: ErrorReply) -> None:
        """Answer and close, unless the answer to an earlier request is still being written."""
        if self.transport.is_closing():
            return
        cycle = cast("Any", self.cycle)
        if cycle is None or cycle.response_complete:
            body = reply.body
            head = (
                f"HTTP/1.1 {reply.status} Refused\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
