"""Gives each HTTP request an id, and counts its outcome."""

from __future__ import annotations

import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.readings.metrics import ServerMetrics
from quire.server.readings.spans import TraceContext
from quire.server.requests.errors import CLIENT_LEFT, error_reply, is_messages_path

__all__ = ["RequestTrace", "is_label"]

_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class RequestTrace:
    """ASGI middleware, the outermost.

    The id is the client's `X-Request-Id` if it is a short label, otherwise a new one. It is in
    `scope["state"]["request_id"]`, and returns as `x-request-id`, from the Messages API also as
    `request-id`.

    has_spans: give each request a place in a trace, below its `traceparent`; the reply has that
    place in the same header, and `scope["state"]["trace_context"]` holds it.

    Ids are for people. Only timelines are looked up by them.
    """

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, max_label_chars: int, *, has_spans: bool
    ) -> None:
        self._app = app
        self._has_spans = has_spans
        self._metrics = metrics
        self._max_label_chars = max_label_chars

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = _header(scope, b"x-request-id")
        if not is_label(request_id, self._max_label_chars):
            request_id = secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        headers = [(b"x-request-id", request_id.encode("ascii"))]
        if is_messages_path(scope["path"]):
            headers.append((b"request-id", headers[0][1]))
        if self._has_spans:
            context = TraceContext.begin(_header(scope, b"traceparent"))
            state["trace_context"] = context
            headers.append((b"traceparent", context.traceparent.encode("ascii")))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        self._metrics.num_open_requests += 1
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001  the last net: the client gets an answer
            await self._answer(error, scope, status, send_with_id)
        finally:
            self._metrics.num_open_requests -= 1
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "OTHER"
            seconds = time.monotonic() - started
            self._metrics.count_http(route, method, status or CLIENT_LEFT, seconds)

    async def _answer(self, error: Exception, scope: Scope, status: int, send: Send) -> None:
        reply = error_reply(error, scope)
        if status:
            return
        headers = [(name.encode(), value.encode()) for name, value in reply.headers.items()]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body, "more_body": False})


def _header(scope: Scope, name: bytes) -> str:
    """Return the first value of a header, "" without one."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), b"").decode("latin-1")


def is_label(text: str, max_chars: int) -> bool:
    """Return True if `text` can stand unchanged in headers, logs and JSON."""
    return 0 < len(text) <= max_chars and text.isascii() and text.isprintable()
