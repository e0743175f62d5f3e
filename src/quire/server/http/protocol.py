"""HTTP/1.x connections by RFC 9110 and 9112. They add bounds that uvicorn's own lack, on headers
and on slow clients, and a fast path for the bodies of streams."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any, cast

import httptools
from starlette.responses import Response
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.http.websocket import WEBSOCKET, WebSocket, offered_key
from quire.server.requests.errors import ErrorReply
from quire.server.requests.limits import Limits

__all__ = ["STREAM_BODY", "StreamBody", "limited_protocol"]

STREAM_BODY = "quire.stream_body"
"""Key of the `StreamBody` of a request in its `scope["extensions"]`."""

_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
"""A host and a port (RFC 9110, 7.2); both may be empty."""

LINGER_S = 2.0
"""Seconds without a byte after which a client whose last answer is sent has nothing more to say."""

_ABSOLUTE = re.compile(rb"(?i:https?)://(?P<host>[^/?#]+)(?P<rest>.*)")

_OF_UPGRADES = frozenset({b"upgrade", b"http2-settings"})
"""Headers of an offer to upgrade, and tokens of `Connection` that name them."""


def limited_protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """Return the protocol class for `uvicorn.Config(http=…)`, which makes the instances itself."""

    class LimitedProtocol(_LimitedProtocol):
        bounds = limits

    return LimitedProtocol


class _OfRequest:
    """The transport as a request sees it. is_closing, close: methods of the connection that replace
    its own."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(
        self,
        transport: asyncio.Transport,
        is_closing: Callable[[], bool],
        close: Callable[[], None],
    ) -> None:
        self.write = transport.write
        self.is_closing = is_closing
        self.close = close


class StreamBody:
    """The body of a response whose head was sent through ASGI without a length. Its pieces reach
    the connection without an ASGI message each and without task switches."""

    __slots__ = ("_cycle", "_flow", "_is_chunked", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write
        self._is_chunked = cycle.scope["http_version"] != "1.0"

    @property
    def is_full(self) -> bool:
        """True if the client reads more slowly than it is sent to."""
        return self._flow.write_paused

    async def drain(self) -> None:
        """Wait while `is_full`; returns if the client leaves."""
        await self._flow.drain()

    def write(self, data: bytes) -> None:
        """Write one chunk (RFC 9112, 7.1). Does nothing if the client has left."""
        if data and not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)


class _CarefulSend:
    """The `send` for a request of HTTP/1.0, which has no chunks, or with `Expect: 100-continue`.
    The body of the latter may never arrive if the answer does not wait for it, so the connection
    ends."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._is_old = cycle.scope["http_version"] == "1.0"
        self._is_open_ended = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
        elif self._is_open_ended:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)

    def _start(self, message: Message) -> None:
        cycle = self._cycle
        if cycle.waiting_for_100_continue and cycle.more_body:
            cycle.keep_alive = False
        if not self._is_old:
            return
        headers = list(message.get("headers", ()))
        if not any(name.lower() == b"content-length" for name, _ in headers):
            self._is_open_ended = True
            cycle.chunked_encoding = cycle.keep_alive = False
        elif cycle.keep_alive:
            message["headers"] = [*headers, (b"connection", b"keep-alive")]


def _last_answer(reply: ErrorReply) -> ASGIApp:
    """Return an application that gives this answer and ends the connection."""
    return Response(reply.body, reply.status, {**reply.headers, "connection": "close"})


def _too_many_connections(limits: Limits) -> ASGIApp:
    """Serves connections over the limit: their first request is their last."""
    return _last_answer(
        ErrorReply(
            503,
            f"The server has {limits.max_connections} connections open (max_connections). "
            "Try again soon.",
            retry_after_s=1,
        )
    )


class _LimitedProtocol(HttpToolsProtocol):
    bounds: Limits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._num_waiting_bytes = 0  # of requests that wait for the answer to one before them
        self._running: RequestResponseCycle | None = None  # the request that is being answered
        self._in_body = False
        self._is_deaf = False
        self._is_lingering = False
        self._num_unheard_bytes = 0  # since it is deaf
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._offered_key: bytes | None = None  # of the request that is being read
        self._socket: WebSocket | None = None  # once one was accepted

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  as in the base class
        super().connection_made(transport)
        self._start_head_timer()
        if len(self.connections) > self.bounds.max_connections:
            self.app = _too_many_connections(self.bounds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        if self._socket is not None:
            self._socket.connection_lost()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends. An idle WebSocket would be waited for."""
        if self._socket is not None:
            self._socket.finish()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._num_unheard_bytes += len(data)
            return
        if self._socket is not None:
            self._socket.data_received(data)
            return
        self._num_head_bytes += len(data)
        self._parse(data)
        self._bound_waiting(len(data))
        # Only incomplete heads are refused here, complete ones at the gate. Bytes that frame and
        # follow the chunks of a body count as a head does.
        if self._num_head_bytes > self.bounds.max_header_bytes:
            message = (
                f"The headers have more than {self.bounds.max_header_bytes} bytes "
                "(max_header_bytes). Send less."
            )
            self._refuse(ErrorReply(431, message))

    def _bound_waiting(self, num_bytes: int) -> None:
        """Read on while few bytes wait, since only who reads hears that the client has left."""
        if not self.pipeline:
            self._num_waiting_bytes = 0
            return
        self._num_waiting_bytes += num_bytes
        if self._num_waiting_bytes < HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # the base class pauses at every request that waits
        else:
            self.flow.pause_reading()

    # --- requests -------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() != b"CONNECT":
                    self._offered_key = offered_key(self.parser.get_method(), self.headers)
                    data = self._without_offer() + data[offer.args[0] :]
                    continue
                self._refuse(ErrorReply(501, "This server is no proxy. Leave out CONNECT."))
            except httptools.HttpParserError:
                self._refuse(ErrorReply(400, "This is no HTTP/1.1 request (RFC 9112). Correct it."))
            return

    def _without_offer(self) -> bytes:
        """Return the head without its offer to upgrade, which a server declines by ignoring it (RFC
        9110, 7.8). The parser skips the body of a request with an offer, so a new parser must read
        it."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _OF_UPGRADES)
            if name not in _OF_UPGRADES:
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the base class
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._in_body = False
        self._unset_keepalive_if_required()  # only here: empty lines begin no request
        if self._head_timer is None:
            self._start_head_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers are too late for anyone who has read the headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_head_bytes = 0
        if self.parser.should_upgrade():
            return  # it is parsed again, without the offer
        self._in_body = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        is_old = self.parser.get_http_version() == "1.0"
        fault = self._fault_of_framing() or self._fault_of_host() or self._take_target()
        if fault is not None:
            self.app, self.url = _last_answer(fault), b"/"
        if is_old:
            self.expect_100_continue = False  # RFC 9110, 10.1.1
        super().on_headers_complete()
        cycle = self.cycle
        cycle.transport = cast("Any", _OfRequest(self.transport, self._is_closing, self._close))
        extensions: dict[str, object] = {STREAM_BODY: StreamBody(cycle)}
        if self._offered_key is not None:
            extensions[WEBSOCKET] = WebSocket(cycle, self._offered_key, self.bounds, self._accepted)
            self._offered_key = None
        cast("Any", self.scope)["extensions"] = extensions
        if is_old:
            cycle.keep_alive = self.parser.should_keep_alive()
        if is_old or self.expect_100_continue:
            cast("Any", cycle).send = _CarefulSend(cycle)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _accepted(self, socket: WebSocket) -> None:
        self._socket = socket

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        if not self._in_body:
            return  # only the head of a request with an offer
        self._in_body = False
        super().on_message_complete()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None
            # The wait for the next request begins.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _values(self, wanted: bytes) -> list[bytes]:
        return [value for name, value in self.headers if name == wanted]

    def _fault_of_framing(self) -> ErrorReply | None:
        """Return the fault of a version or framing that the parser accepts but this server does not
        speak."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return ErrorReply(505, f"The request is of HTTP/{version}. Send HTTP/1.1.")
        codings = b", ".join(self._values(b"transfer-encoding"))
        if codings and version == "1.0":
            return ErrorReply(400, "HTTP/1.0 has no Transfer-Encoding. Send a Content-Length.")
        if codings and codings.strip().lower() != b"chunked":
            return ErrorReply(501, f"Transfer-Encoding is {_shown(codings)}. Send chunks alone.")
        return None

    def _fault_of_host(self) -> ErrorReply | None:
        hosts = self._values(b"host")
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            return ErrorReply(400, f"The request has {len(hosts)} Host headers. Send one.")
        if hosts and not _HOST.fullmatch(hosts[0]):
            return ErrorReply(
                400, f"The Host header is {_shown(hosts[0])}. Send HOST or HOST:PORT."
            )
        return None

    def _take_target(self) -> ErrorReply | None:
        """Take path and Host from an absolute target, which has precedence over a Host header."""
        if self.url.startswith(b"/") or self.url == b"*":
            return None
        target = _ABSOLUTE.fullmatch(self.url)
        if target is None or not _HOST.fullmatch(target["host"]):
            return ErrorReply(
                400,
                f"The request is for {_shown(self.url)}. Ask for a path, or for http://HOST/PATH.",
            )
        self.url = target["rest"]
        if not self.url.startswith(b"/"):
            self.url = b"/" + self.url
        self.headers[:] = [item for item in self.headers if item[0] != b"host"]
        self.headers.append((b"host", target["host"]))
        return None

    # --- answers --------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self._in_body or self._head_timer is not None:
            self._unset_keepalive_if_required()  # the next request has begun, or this goes on
        # A refused request may still send its body, which nobody reads, but for a limited time.
        if self._in_body and cast("Any", self.cycle).response_complete:
            self._rest_timer = self.loop.call_later(
                self.bounds.body_timeout_s, self.transport.abort
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._start_write_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _start_write_timer(self, num_unsent: int) -> None:
        """End the connection if the client takes none of these bytes meanwhile."""

        def look() -> None:
            num_left = self.transport.get_write_buffer_size()
            if num_left < num_unsent:
                self._start_write_timer(num_left)
            else:
                self._write_timer = None
                self.transport.abort()

        self._write_timer = self.loop.call_later(self.bounds.stalled_write_timeout_s, look)

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
        self._cancel_waits()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _cancel_waits(self) -> None:
        """End all waits for what the client sends."""
        self._unset_keepalive_if_required()
        for timer in (self._head_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._rest_timer = None

    def _refuse(self, reply: ErrorReply) -> None:
        """Answer the request that is being read, after those before it, and read no further.
        Earlier answers are sent whole; if one of them closes the connection, this one is left out.
        """
        if self.transport.is_closing() or self._is_deaf:
            return
        self._is_deaf = True
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if self._in_body and self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline[0] = (self.cycle, cast("Any", _last_answer(reply)))
        elif cycle is None or cycle.response_complete:
            self._answer_at_once(None if self._in_body else reply)
        elif self._in_body and not cycle.response_started:
            cycle.disconnected = True  # for the application, which waits for the rest of the body
            cycle.message_event.set()
            self._answer_at_once(reply)
        else:
            cycle.keep_alive = False

    def _answer_at_once(self, reply: ErrorReply | None) -> None:
        """Send it and close the connection; None if it was answered already."""
        if reply is not None:
            lines = [b"HTTP/1.1 %d Refused" % reply.status, b"content-type: application/json"]
            lines += [b"%b: %b" % header for header in self.server_state.default_headers]
            lines += [
                b"content-length: %d" % len(reply.body),
                b"connection: close",
                b"",
                reply.body,
            ]
            self.transport.write(b"\r\n".join(lines))
        self._close()

    def _is_closing(self) -> bool:
        return self._is_lingering or self.transport.is_closing()

    def _close(self) -> None:
        """Close the connection, but hear the client out first: closing with unread bytes resets it,
        and the client would lose the answer (RFC 9112, 9.6)."""
        if self._is_closing():
            return
        if not (self._in_body or self._is_deaf or self.flow.read_paused):
            self.transport.close()
            return
        self._is_lingering = self._is_deaf = True
        self._cancel_waits()
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has left
                self.transport.write_eof()
        self.flow.resume_reading()
        self._start_linger_timer(self.loop.time() + self.bounds.body_timeout_s)

    def _start_linger_timer(self, end_s: float) -> None:
        """Close the connection once nothing more comes, or at `end_s`."""
        num_before = self._num_unheard_bytes

        def look() -> None:
            self._rest_timer = None
            if self._num_unheard_bytes > num_before and self.loop.time() < end_s:
                self._start_linger_timer(end_s)
            else:
                self.transport.close()

        self._rest_timer = self.loop.call_later(LINGER_S, look)


def _shown(value: bytes) -> str:
    return repr(value[:80].decode("latin-1"))
