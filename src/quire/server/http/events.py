"""Server-sent events: a response that is written piece by piece, and ends in exactly one way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.http.protocol import STREAM_BODY, StreamBody
from quire.server.requests.errors import ErrorReply, error_reply

__all__ = ["DONE", "EventSink", "EventStream", "error_event", "while_connected"]

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Result = TypeVar("Result")


def error_event(reply: ErrorReply) -> bytes:
    """Return the event of an error in a stream, as OpenAI clients read it."""
    return b"data: " + reply.body + b"\n\n"


class _AsgiBody:
    """A `StreamBody` for servers other than ours: pieces wait until `drain` sends them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held = b""

    @property
    def is_full(self) -> bool:
        return bool(self._held)

    def write(self, data: bytes) -> None:
        self._held += data

    async def drain(self) -> None:
        data, self._held = self._held, b""
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


class EventSink:
    """Destination of a stream: an `Outlet`, full until the response has started.

    While the client's buffer is full, the writer holds its output back. So a slow reader costs no
    more memory here than that buffer; tokens wait in the engine's client, in few bytes.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        body: StreamBody | None = scope.get("extensions", {}).get(STREAM_BODY)
        self._body = body or _AsgiBody(send)
        self._started = asyncio.Event()
        self._time = asyncio.get_running_loop().time
        self._spoken_s = 0.0

    @property
    def has_started(self) -> bool:
        """True if the client has the status. Later faults are events."""
        return self._started.is_set()

    @property
    def is_full(self) -> bool:
        return not self._started.is_set() or self._body.is_full

    async def start(self) -> None:
        """Send status and headers, once nothing can be refused any more."""
        if not self.has_started:
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._spoken_s = self._time()
            self._started.set()

    def write(self, events: bytes) -> None:
        """Write whole events, after the start."""
        self._spoken_s = self._time()
        self._body.write(events)

    async def flush(self) -> None:
        """Wait for the start, and until the client has room for more."""
        await self._started.wait()
        await self._body.drain()

    async def keep_alive(self, interval_s: float) -> None:
        """Write a comment, for ever, whenever nothing was written for this long."""
        await self._started.wait()
        while True:
            silent_s = self._time() - self._spoken_s
            if silent_s < interval_s:
                await asyncio.sleep(interval_s - silent_s)
                continue
            self._spoken_s = self._time()
            if not self._body.is_full:
                self._body.write(_KEEP_ALIVE)
                await self._body.drain()

    async def end(self, events: bytes) -> None:
        """Write the last events, and end the response."""
        await self.start()
        await self._body.drain()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})


class EventStream(Response):
    """Runs `produce`, which starts the sink, writes events and returns the last ones, [DONE]
    included.

    If it raises before the start, the client gets an ordinary error response; later, an error event
    as the last one. If the client leaves, `produce` is cancelled.
    """

    def __init__(
        self,
        produce: Callable[[EventSink], Coroutine[Any, Any, bytes]],
        keep_alive_s: float,
        fault: Callable[[ErrorReply], bytes] = error_event,
    ) -> None:
        """fault: writes an error that occurs after the start."""
        super().__init__()
        self._produce = produce
        self._keep_alive_s = keep_alive_s
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = EventSink(scope, send)
        comments = asyncio.create_task(sink.keep_alive(self._keep_alive_s))
        try:
            last = await while_connected(receive, self._produce(sink))
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  whatever it was, the stream must end
            comments.cancel()
            await self._fail(sink, error, scope, receive, send)
            return
        finally:
            comments.cancel()
        await sink.end(last)

    async def _fail(
        self, sink: EventSink, error: Exception, scope: Scope, receive: Receive, send: Send
    ) -> None:
        reply = error_reply(error, scope)
        if not sink.has_started:
            await Response(reply.body, reply.status, reply.headers)(scope, receive, send)
            return
        await sink.end(self._fault(reply))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, which is cancelled if the client leaves first.

    Call it when the whole body has been read. Raises ClientDisconnect if the client left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
