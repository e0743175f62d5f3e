"""All routes, gathered, and registered with the application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from quire.server.generation.backend import Ready
from quire.server.http.body import BodyDecoder
from quire.server.openai.answer import encode
from quire.server.routes import (
    batches,
    control,
    messages,
    openai,
    ops,
    page,
    prefixes,
    responses,
    sessions,
    text,
    tokens,
    vectors,
)
from quire.server.routes.route import Access, Call, Needs, Route
from quire.server.routes.services import Services
from quire.server.settings import ServerSettings

__all__ = ["GROUPS", "Endpoint", "RouteTable"]

GROUPS: tuple[tuple[str, tuple[Route[Any, Any], ...]], ...] = (
    ("OpenAI", openai.ROUTES),
    ("Messages", messages.ROUTES),
    ("Responses", responses.ROUTES),
    ("tokens", tokens.ROUTES),
    ("tokenizer", text.ROUTES),
    ("operations", (*ops.ROUTES, *prefixes.ROUTES, *sessions.ROUTES, *control.ROUTES)),
    ("page", page.ROUTES),
    ("vectors", vectors.ROUTES),
    ("Batches", batches.ROUTES),
)
"""Tables of routes, each with the tag under which the schema shows it."""

_OPENING_FLAGS = {
    Access.ENGINE_CONTROL: "--enable-engine-control",
    Access.PAGE: "--ui",
    Access.VIEWERS: "--ui",
}
"""Flags that open routes."""


class RouteTable:
    """The routes of one server. opened: routes that it serves. closed: routes that a setting would
    open."""

    def __init__(self, settings: ServerSettings) -> None:
        self._root_path = settings.root_path
        self._lacks = set[Access]()
        if not settings.enable_engine_control:
            self._lacks.add(Access.ENGINE_CONTROL)
        if not settings.ui:
            self._lacks |= {Access.PAGE, Access.VIEWERS}
        routes = [route for _, group in GROUPS for route in group]
        self.opened = [route for route in routes if route.access not in self._lacks]
        self.closed = [route for route in routes if route.access in self._lacks]
        self._patterns = {route.path: compile_path(route.path)[0] for route in routes}
        self._literal = {route.path for route in self.opened if route.is_literal}

    @property
    def open_paths(self) -> frozenset[str]:
        """Paths that need no key."""
        free = (Access.ANYONE, Access.PAGE)
        return frozenset(each.path for each in self.opened if each.access in free)

    @property
    def verbs(self) -> list[str]:
        """Methods that some route has."""
        return sorted({route.method for route in self.opened})

    def register(self, app: FastAPI, services: Services) -> dict[tuple[str, str], Endpoint]:
        """Add the routes to the application. Return the hot ones by method and path."""
        hot: dict[tuple[str, str], Endpoint] = {}
        for tag, route in ((tag, route) for tag, group in GROUPS for route in group):
            if route.access in self._lacks:
                continue
            endpoint = Endpoint(route, services, self)
            app.add_api_route(
                route.path,
                endpoint.respond,
                methods=[route.method],
                tags=[tag],
                name=route.name,
                description=route.words,
                response_model=None,
                include_in_schema=route.is_listed,
            )
            if route.is_hot:
                hot[route.method, route.path] = endpoint
        return hot

    def is_literal(self, path: str) -> bool:
        """Return True if a route has exactly this path."""
        return self._below_root(path) in self._literal

    def methods(self, path: str) -> list[str]:
        """Return the methods that a path has. A path of its own, such as /v1/responses/compact, is
        no id of another route's."""
        matching = self._matching(self.opened, path)
        found = {each.method for each in matching if each.is_literal or not self.is_literal(path)}
        return sorted(found | {"HEAD"} if "GET" in found else found)

    def opening_flag(self, path: str) -> str | None:
        """Return the flag that would open a route at this path, or None."""
        closed = self._matching(self.closed, path)
        return _OPENING_FLAGS[closed[0].access] if closed else None

    def _matching(self, routes: list[Route[Any, Any]], path: str) -> list[Route[Any, Any]]:
        below = self._below_root(path)
        return [route for route in routes if self._patterns[route.path].match(below)]

    def _below_root(self, path: str) -> str:
        is_below = path.startswith(f"{self._root_path}/")
        return path.removeprefix(self._root_path) if is_below else path


class Endpoint:
    """One route of one server: reads what it takes, calls its handler, and writes what that
    returns."""

    def __init__(self, route: Route[Any, Any], services: Services, table: RouteTable) -> None:
        self.route = route
        self._services = services
        self._table = table
        limits = services.settings.limits
        self._decoder: BodyDecoder[Any] | None = (
            None if route.body is None else BodyDecoder(route.body, limits)
        )

    async def respond(self, request: Request) -> Response:
        """Return the response. Errors as of the handler; 405 at another route's own path."""
        route, services = self.route, self._services
        if not route.is_literal and self._table.is_literal(request.scope["path"]):
            raise HTTPException(405)
        engine = self._needed()
        data, body = b"", None
        if route.body is not None and route.may_lack_body and not _has_body(request):
            body = route.body()
        elif self._decoder is not None:
            data = await services.bodies.read(request)
            body = await self._decoder.decode(data)
        found = await route.handler(Call(services, request, body, data, engine))
        if isinstance(found, Response):
            return found
        return Response(found if isinstance(found, str) else encode(found), media_type=route.media)

    def _needed(self) -> Ready | None:
        match self.route.needs:
            case Needs.NOTHING:
                return None
            case Needs.ENGINE:
                return self._services.backend.require()
            case Needs.ROOM:
                return self._services.ready()
            case Needs.FILES:
                self._services.files()
                return None


def _has_body(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
