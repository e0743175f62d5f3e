"""The application: routes, their guards, and the periodic tasks beside them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import quire
from quire.base.errors import QuireError
from quire.protocol.status import EngineState
from quire.server.batches.service import BatchService
from quire.server.generation.backend import Backend
from quire.server.http.gate import Gate
from quire.server.http.hot_routes import HotRoutes
from quire.server.http.trace import RequestTrace
from quire.server.readings.front_board import FrontBoard
from quire.server.readings.stats_line import StatsLine
from quire.server.requests.errors import CLIENT_LEFT, RefusedError, error_reply
from quire.server.routes.page import record_page
from quire.server.routes.schema import describe
from quire.server.routes.services import Services
from quire.server.routes.table import RouteTable
from quire.server.settings import ServerSettings

__all__ = ["create_app"]

logger = logging.getLogger("quire.server")

TICK_S = 1.0
_SILENT = (EngineState.STALLED, EngineState.RESTARTING)


def create_app(
    settings: ServerSettings, backend: Backend, *, board: FrontBoard | None = None, front: int = 0
) -> FastAPI:
    """Return an ASGI application that serves the engine of `backend`, and answers 503 while there
    is none. board, front: see `Services`."""
    services = Services(settings, backend, board, front)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        ticking = asyncio.create_task(_tick(services))
        ticking.add_done_callback(functools.partial(_log_end, what="figures are no longer kept"))
        recording = asyncio.create_task(record_page(services))
        recording.add_done_callback(functools.partial(_log_end, what="the page is not recorded"))
        restoring = asyncio.create_task(services.restore_sessions())
        restoring.add_done_callback(functools.partial(_log_end, what="sessions are not restored"))
        running = None
        if services.batches is not None:
            batches = BatchService(app, backend, services.batches, settings.limits)
            running = asyncio.create_task(batches.run())
            running.add_done_callback(functools.partial(_log_end, what="batches are no longer run"))
        try:
            yield
        finally:
            if running is not None:
                running.cancel()
                await asyncio.wait((running,))
            ticking.cancel()
            recording.cancel()
            restoring.cancel()
            await services.close()

    # Its own pages load script and style from elsewhere.
    no_pages: dict[str, Any] = {"docs_url": None, "redoc_url": None}
    app = FastAPI(title="quire", version=quire.__version__, lifespan=lifespan, **no_pages)
    table = RouteTable(settings)
    hot = table.register(app, services)
    for kind in (QuireError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, functools.partial(_reply, table))
    _describe(app, table, settings)
    # The middleware that is added last is the first that a request meets.
    app.add_middleware(HotRoutes, hot=hot, root_path=settings.root_path)
    app.add_middleware(_HeadAsGet)
    app.add_middleware(Gate, settings=settings, open_paths=table.open_paths)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=table.verbs,
            allow_headers=["*"],
        )
    app.add_middleware(_Paths, root_path=settings.root_path)
    app.add_middleware(
        RequestTrace,
        metrics=services.metrics,
        max_label_chars=settings.limits.max_label_chars,
        has_spans=services.spans is not None,
    )
    return app


class _Paths:
    """ASGI middleware: ignores a slash at the end of a path, and finds routes below `root_path`
    too, for proxies that do not strip it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self._root_path
            if scope["path"].endswith("/"):
                scope["path"] = scope["path"].rstrip("/") or "/"
            if scope["path"] == self._root_path:
                scope["path"] += "/"
        await self._app(scope, receive, send)


class _HeadAsGet:
    """ASGI middleware: treats HEAD as GET; the HTTP server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}
        await self._app(as_get, receive, send)
        scope["route"] = as_get.get("route")  # the name under which it is counted


async def _reply(table: RouteTable, request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            headers["allow"] = ", ".join(table.methods(request.scope["path"]))
        error = _as_refused(table, request, error)
    reply = error_reply(error, request.scope)
    return Response(reply.body, reply.status, {**reply.headers, **headers})


def _as_refused(table: RouteTable, request: Request, error: HTTPException) -> RefusedError:
    """Answer unknown routes and methods in the shape of all other errors."""
    path = request.url.path[:128]
    if error.status_code == 404:
        is_meant = table.methods(f"/v1{request.url.path}")
        meant = f"Did you mean '/v1{path}'?" if is_meant else "See /docs."
        flag = table.opening_flag(request.scope["path"])
        if flag is not None:
            meant = f"It is closed: the server opens it with {flag}."
        return RefusedError(f"There is no route {path!r}. {meant}", status=404)
    if error.status_code == 405:
        return RefusedError(f"{request.method[:16]} does not go with {path!r}.", status=405)
    return RefusedError(str(error.detail)[:200], status=error.status_code)


def _describe(app: FastAPI, table: RouteTable, settings: ServerSettings) -> None:
    document = app.openapi

    def openapi() -> dict[str, Any]:
        return describe(document(), table.opened, settings.limits)

    app.openapi = openapi


def _log_end(task: asyncio.Task[None], what: str) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("of this front, %s", what, exc_info=task.exception())


async def _tick(services: Services) -> None:
    """Measure the rate of prefill once a second, and log a line of figures now and then."""
    settings = services.settings
    line = StatsLine(settings.log_stats_interval)
    while True:
        try:
            services.show()
        except OSError as error:  # the next tick tries again
            logger.warning("this front's reading cannot be shown to the others: %s", error)
        await asyncio.sleep(TICK_S)
        client = services.backend.client
        if client is None:
            continue
        stats = client.stats
        services.waiting.observe(stats.prompt_tokens_total - stats.cached_tokens_total)
        services.waiting.observe_speed(stats.prefill_tokens_per_s)
        services.waiting.note_silence(is_silent=client.status.state in _SILENT)
        if not settings.disable_log_stats:
            capacity = client.status.capacity
            line.tick(stats, services.metrics, "" if capacity is None else capacity.device)
