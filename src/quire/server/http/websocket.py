"""The server's side of WebSockets (RFC 6455), over a connection that HTTP has accepted."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from quire.server.http.body import BytesInFlight
from quire.server.requests.limits import Limits

__all__ = ["WEBSOCKET", "CloseCode", "FrameReader", "WebSocket", "offered_key"]

WEBSOCKET = "quire.websocket"
"""Key of the `WebSocket` that a request offers to open in its `scope["extensions"]`."""

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Proof that the server speaks the protocol (section 1.3)."""
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_MAX_CONTROL_BYTES = 125
_MAX_WAITING = 4
"""Messages that may wait while another one is answered."""


class CloseCode(IntEnum):
    """Reasons for an end (section 7.4.1)."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED = 1003
    NOT_UTF8 = 1007
    POLICY = 1008
    TOO_BIG = 1009
    TRY_AGAIN_LATER = 1013


class FrameError(Exception):
    """The client does not keep to the protocol, or to the server's bounds."""

    def __init__(self, code: CloseCode) -> None:
        super().__init__(code.name)
        self.code = code


def offered_key(method: bytes, headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key of a request that offers to go on as a WebSocket; None if it does not."""
    found = dict(headers)
    tokens = [token.strip().lower() for token in found.get(b"connection", b"").split(b",")]
    is_offer = found.get(b"upgrade", b"").lower() == b"websocket" and b"upgrade" in tokens
    if method != b"GET" or not is_offer or found.get(b"sec-websocket-version") != b"13":
        return None
    key = found.get(b"sec-websocket-key", b"")
    try:
        return key if len(base64.b64decode(key, validate=True)) == 16 else None
    except binascii.Error:
        return None


def frame(opcode: int, data: bytes) -> bytes:
    """Return one whole message, unmasked as those of a server are (section 5.2)."""
    size = len(data)
    if size <= _MAX_CONTROL_BYTES:
        head = bytes((0x80 | opcode, size))
    elif size < 2**16:
        head = bytes((0x80 | opcode, 126)) + size.to_bytes(2)
    else:
        head = bytes((0x80 | opcode, 127)) + size.to_bytes(8)
    return head + data


class FrameReader:
    """Reads what a client sends, in pieces of any size. FrameError where it is wrong."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: bound of one message."""
        self._max_bytes = max_bytes
        self._held = bytearray()
        self._message = bytearray()
        self._kind: int | None = None  # of the message that has begun

    @property
    def num_bytes(self) -> int:
        """Bytes that are held of a message or frame that is not whole."""
        return len(self._held) + len(self._message)

    @property
    def is_amid(self) -> bool:
        """True if a message or frame has begun."""
        return bool(self._held) or self._kind is not None

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the messages and control frames that are whole now: opcode and data of each."""
        self._held += data
        found: list[tuple[int, bytes]] = []
        while (each := self._next()) is not None:
            opcode, is_last, content = each
            if opcode >= _CLOSE:
                found.append((opcode, content))
                continue
            if (opcode == _CONTINUATION) != (self._kind is not None):
                raise FrameError(CloseCode.PROTOCOL_ERROR)
            self._kind = opcode if self._kind is None else self._kind
            self._message += content
            if is_last:
                found.append((self._kind, bytes(self._message)))
                self._kind = None
                self._message.clear()
        return found

    def _next(self) -> tuple[int, bool, bytes] | None:
        """Opcode, whether its message ends, and data of the next frame, if it is whole."""
        held = self._held
        if len(held) < 2:
            return None
        opcode, is_last, short = held[0] & 15, bool(held[0] & 0x80), held[1] & 127
        is_control = opcode >= _CLOSE
        is_known = opcode in (_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG)
        is_fine = not is_control or (is_last and short <= _MAX_CONTROL_BYTES)
        if held[0] & 0x70 or not held[1] & 0x80 or not is_known or not is_fine:
            raise FrameError(CloseCode.PROTOCOL_ERROR)
        start = 2 + {126: 2, 127: 8}.get(short, 0)
        if len(held) < start:
            return None
        size = short if start == 2 else int.from_bytes(held[2:start])
        if size + (0 if is_control else len(self._message)) > self._max_bytes:
            raise FrameError(CloseCode.TOO_BIG)
        end = start + 4 + size
        if len(held) < end:
            return None
        content = _unmasked(bytes(held[start : start + 4]), bytes(held[start + 4 : end]))
        del held[:end]
        return opcode, is_last, content


def _unmasked(mask: bytes, data: bytes) -> bytes:
    """XOR with the mask, over and over (section 5.3)."""
    size = len(data)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data) ^ int.from_bytes(key)).to_bytes(size)


class WebSocket:
    """A connection that a request offers to open. Nothing happens before `accept`."""

    def __init__(
        self,
        cycle: RequestResponseCycle,
        key: bytes,
        limits: Limits,
        on_accept: Callable[[WebSocket], None],
    ) -> None:
        """cycle: cycle of the request. key: result of `offered_key`. limits: bounds of bodies,
        which hold for messages too. on_accept: called before the client's bytes go to
        `data_received`."""
        self._cycle = cycle
        self._key = key
        self._reader = FrameReader(limits.max_body_bytes)
        self._timeout_s = limits.body_timeout_s
        self._on_accept = on_accept
        self._in_flight: BytesInFlight | None = None
        self._num_counted = 0
        self._messages: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._is_awaited = self._is_ending = self._is_closing = False
        self._spoken_s = 0.0
        self._started_s = 0.0  # of the message that comes
        self._timer: asyncio.TimerHandle | None = None
        self.lost = asyncio.Event()
        """The client has left, or the connection is being closed."""

    async def accept(self, send: Send, in_flight: BytesInFlight) -> None:
        """Answer the request by the change of protocols (section 4.2.2). in_flight: counts what is
        held of messages."""
        self._in_flight = in_flight
        proof = base64.b64encode(hashlib.sha1(self._key + _GUID).digest())
        headers = [(b"upgrade", b"websocket"), (b"connection", b"Upgrade")]
        self._cycle.chunked_encoding = False
        self._on_accept(self)
        headers.append((b"sec-websocket-accept", proof))
        await send({"type": "http.response.start", "status": 101, "headers": headers})

    async def receive(self) -> bytes | None:
        """Wait for the next message, a text in UTF-8. None if the connection ends."""
        if self._is_ending:
            self.close()
        self._is_awaited = True
        try:
            while not self._messages and not self.lost.is_set():
                self._news.clear()
                await self._news.wait()
        finally:
            self._is_awaited = False
        if self.lost.is_set():
            return None
        message = self._messages.popleft()
        self._count()
        return message

    async def send(self, text: bytes) -> None:
        """Send a message, and wait while the client takes less than it is sent."""
        if not self._is_closing and not self.lost.is_set():
            self._write(_TEXT, text)
            await self._cycle.flow.drain()

    async def keep_alive(self, interval_s: float) -> None:
        """Send a ping, for ever, whenever nothing was sent for this long."""
        loop = asyncio.get_running_loop()
        self._spoken_s = loop.time()
        while not self.lost.is_set():
            silent_s = loop.time() - self._spoken_s
            if silent_s < interval_s:
                await asyncio.sleep(interval_s - silent_s)
            elif self._cycle.flow.write_paused:
                await self._cycle.flow.drain()
            else:
                self._write(_PING, b"")

    def _write(self, opcode: int, data: bytes) -> None:
        self._spoken_s = asyncio.get_running_loop().time()
        self._cycle.transport.write(frame(opcode, data))

    def finish(self) -> None:
        """End the connection, as the server ends: now, or after the answer that is being sent."""
        self._is_ending = True
        if self._is_awaited:
            self.close()

    def close(self, code: CloseCode | None = None) -> None:
        """End the connection, with a reason."""
        if not self._is_closing:
            self._is_closing = True
            if code is None:
                code = CloseCode.GOING_AWAY if self._is_ending else CloseCode.NORMAL
            if not self.lost.is_set():
                self._write(_CLOSE, code.to_bytes(2))
                self._cycle.transport.close()
            self.connection_lost()

    def data_received(self, data: bytes) -> None:
        """Take what the client sends."""
        if self._is_closing:
            return
        try:
            found = self._reader.feed(data)
            for opcode, content in found:
                self._take(opcode, content)
            if self._count() and self._in_flight is not None and self._in_flight.is_over:
                raise FrameError(CloseCode.TRY_AGAIN_LATER)
        except FrameError as error:
            self.close(error.code)
        else:
            self._time(has_message=any(opcode < _CLOSE for opcode, _ in found))

    def _count(self) -> int:
        """Bring the count of bytes in flight up to date, and return the part of this connection."""
        is_open = not self.lost.is_set()
        num_bytes = self._reader.num_bytes + sum(map(len, self._messages)) if is_open else 0
        if self._in_flight is not None:
            self._in_flight.num_bytes += num_bytes - self._num_counted
        self._num_counted = num_bytes
        return num_bytes

    def _time(self, *, has_message: bool) -> None:
        """Give a message that has begun its time. has_message: an earlier one has ended."""
        is_amid = self._reader.is_amid and not self._is_closing
        if self._timer is not None and (has_message or not is_amid):
            self._timer.cancel()
            self._timer = None
        if is_amid and self._timer is None:
            loop = asyncio.get_running_loop()
            self._started_s = loop.time()
            self._timer = loop.call_later(self._timeout_s, self._expire)

    def _expire(self) -> None:
        """End the connection if the message has had its time, with 1 s per MiB."""
        loop = asyncio.get_running_loop()
        end = self._started_s + self._timeout_s + self._reader.num_bytes / 2**20
        if loop.time() < end:
            self._timer = loop.call_at(end, self._expire)
        else:
            self.close(CloseCode.POLICY)

    def _take(self, opcode: int, content: bytes) -> None:
        if self._is_closing:
            return
        if opcode == _PING:
            if not self._cycle.flow.write_paused:  # a later ping's pong will do (section 5.5.3)
                self._write(_PONG, content)
        elif opcode == _CLOSE:
            self.close()
        elif opcode == _BINARY:
            raise FrameError(CloseCode.UNSUPPORTED)
        elif opcode == _TEXT:
            try:
                content.decode()
            except UnicodeDecodeError:
                raise FrameError(CloseCode.NOT_UTF8) from None
            if len(self._messages) >= _MAX_WAITING + self._is_awaited:
                raise FrameError(CloseCode.TRY_AGAIN_LATER)
            self._messages.append(content)
            self._news.set()

    def connection_lost(self) -> None:
        """The client has left."""
        self._cycle.disconnected = True
        self.lost.set()
        self._news.set()
        self._messages.clear()
        self._count()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
