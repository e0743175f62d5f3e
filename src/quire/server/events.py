"""Server-sent events: a response that is written as it comes, and ends in exactly one way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import error_reply

__all__ = ["DONE", "EventSink", "EventStream", "while_connected"]

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Result = TypeVar("Result")


class EventSink:
    """Where a stream is written. `write` waits while the client's buffer is full, so that a slow
    reader holds no more than one chunk here; tokens wait in the engine's client, in few bytes."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._turn = asyncio.Lock()
        self.has_started = False
        self.last_write = 0.0

    async def write(self, events: bytes) -> None:
        """Send whole events. The first call sends status and headers, too."""
        async with self._turn:
            if not self.has_started:
                self.has_started = True
                start = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
            self.last_write = asyncio.get_running_loop().time()

    async def keep_alive(self, idle_s: float) -> None:
        """Send a comment if nothing was sent for so long, and nothing is being sent."""
        silent_s = asyncio.get_running_loop().time() - self.last_write
        if self.has_started and not self._turn.locked() and silent_s >= idle_s:
            await self.write(_KEEP_ALIVE)

    async def close(self) -> None:
        """The end of the response."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Runs `produce`, which writes the events up to and including [DONE].

    If it raises before anything was written, the client gets an ordinary error response; later it
    gets one error event, as the last. If the client leaves, `produce` is cancelled.
    """

    def __init__(
        self, produce: Callable[[EventSink], Coroutine[Any, Any, None]], keep_alive_s: float
    ) -> None:
        super().__init__()
        self._produce = produce
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = EventSink(send, _HEADERS)
        comments = asyncio.create_task(self._send_comments(sink))
        try:
            await while_connected(receive, self._produce(sink))
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  whatever it was, the stream must end
            comments.cancel()
            await self._fail(sink, error, scope, receive, send)
            return
        finally:
            comments.cancel()
        await sink.close()

    async def _fail(
        self, sink: EventSink, error: Exception, scope: Scope, receive: Receive, send: Send
    ) -> None:
        reply = error_reply(error)
        if not sink.has_started:
            await Response(reply.body, reply.status, reply.headers)(scope, receive, send)
            return
        await sink.write(b"data: " + reply.body + b"\n\n")
        await sink.close()

    async def _send_comments(self, sink: EventSink) -> None:
        while True:
            await asyncio.sleep(self._keep_alive_s)
            await sink.keep_alive(self._keep_alive_s)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client leaves before it is done.

    To be called when the whole body has been read. Raises ClientDisconnect if the client left.
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
