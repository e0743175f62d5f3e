"""Routes that take most of the load, served without FastAPI's machinery around an endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.requests.errors import CLIENT_LEFT, error_reply

__all__ = ["HotRoutes"]


class _HasPath(Protocol):
    @property
    def path(self) -> str: ...


class _Endpoint(Protocol):
    """route: object in the scope of a request."""

    @property
    def route(self) -> _HasPath: ...

    @property
    def respond(self) -> Callable[[Request], Awaitable[Response]]: ...


class HotRoutes:
    """ASGI middleware, the innermost. FastAPI has these routes too, for their schema and for other
    methods, but their endpoints are called directly here."""

    def __init__(
        self, app: ASGIApp, hot: Mapping[tuple[str, str], _Endpoint], root_path: str
    ) -> None:
        """hot: endpoints by method and path."""
        self._app = app
        self._hot = {
            (method, root + path): endpoint
            for (method, path), endpoint in hot.items()
            for root in ("", root_path)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        hot = self._hot.get((scope["method"], scope["path"])) if is_http else None
        if hot is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = hot.route
        response: Response
        try:
            response = await hot.respond(Request(scope, receive))
        except ClientDisconnect:
            response = Response(status_code=CLIENT_LEFT)
        except Exception as error:  # noqa: BLE001  as the application's own handlers do
            reply = error_reply(error, scope)
            response = Response(reply.body, reply.status, reply.headers)
        await response(scope, receive, send)
