"""The generating routes, served without FastAPI's machinery around an endpoint."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.requests.errors import CLIENT_LEFT, error_reply

__all__ = ["HotRoutes"]


class HotRoutes:
    """ASGI middleware, the innermost. FastAPI declares these routes and their schema, but their
    endpoints are called directly here. They take the request, and read and check the body
    themselves."""

    def __init__(self, app: ASGIApp, routes: Iterable[APIRoute], root_path: str) -> None:
        """routes: POST only, without parameters in their paths."""
        self._app = app
        known = {route.path: route for route in routes}
        self._routes = known | {root_path + path: route for path, route in known.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response: Response
        try:
            response = await route.endpoint(Request(scope, receive))
        except ClientDisconnect:
            response = Response(status_code=CLIENT_LEFT)
        except Exception as error:  # noqa: BLE001  as the application's own handlers do
            reply = error_reply(error, scope)
            response = Response(reply.body, reply.status, reply.headers)
        await response(scope, receive, send)
