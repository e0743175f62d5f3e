"""Routes for operators: health, metrics, and timelines of requests."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

import quire
from quire.protocol.status import EngineState
from quire.server.openai.answer import encode
from quire.server.readings.short_status import short_status
from quire.server.requests.errors import RefusedError
from quire.server.routes.exposition import Exposition
from quire.server.routes.services import Services

__all__ = ["ops_router"]

JSON = "application/json"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Policy that browsers hold the page to: it asks this server alone."""

_HEALTHY = (EngineState.READY, EngineState.SLEEPING, EngineState.DRAINING)


def ops_router(services: Services) -> APIRouter:
    """Probes, metrics, load, version, and timelines."""
    router = APIRouter(tags=["operations"])
    page = Path(__file__).with_name("docs.html").read_bytes()
    _add_probes(router, services)
    _add_readings(router, services)
    _add_timelines(router, services)

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """A page of all routes, which loads nothing from elsewhere."""
        headers = {"content-security-policy": _PAGE_POLICY}
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    return router


def _add_probes(router: APIRouter, services: Services) -> None:
    def probe(*, is_well: bool) -> Response:
        status = services.backend.status
        return Response(encode(short_status(status)), 200 if is_well else 503, media_type=JSON)

    @router.get("/livez")
    async def livez() -> Response:
        """200 while this process can serve, or may again: restart it otherwise."""
        return probe(is_well=services.backend.status.state is not EngineState.DEAD)

    @router.get("/health")
    async def health() -> Response:
        """200 while the engine makes progress."""
        return probe(is_well=services.backend.status.state in _HEALTHY)

    @router.get("/readyz")
    async def readyz() -> Response:
        """200 while new requests are taken."""
        return probe(is_well=services.backend.status.state is EngineState.READY)

    @router.get("/ping", include_in_schema=False)
    @router.post("/ping", include_in_schema=False)
    async def ping() -> Response:
        return await health()


def _add_readings(router: APIRouter, services: Services) -> None:
    exposition = Exposition(services)

    @router.get("/version")
    async def show_version() -> Response:
        """The version of quire."""
        return Response(encode({"version": quire.__version__}), media_type=JSON)

    @router.get("/load")
    async def load() -> Response:
        """Requests that are open, and of these the ones that wait for the engine."""
        total = services.total()
        found = {
            "server_load": total.metrics.num_open_requests - 1,  # without this one
            "waiting_requests": total.num_waiting_requests,
            "waiting_tokens": total.num_waiting_tokens,
        }
        return Response(encode(found), media_type=JSON)

    @router.get("/metrics")
    async def metrics() -> Response:
        """In the text format of Prometheus."""
        return Response(exposition.text(), media_type=exposition.media_type)

    @router.get("/admin/status")
    async def status() -> Response:
        """The engine's state, the phases of its start, and its capacity."""
        return Response(encode(services.backend.status), media_type=JSON)


def _add_timelines(router: APIRouter, services: Services) -> None:
    @router.get("/admin/requests")
    async def timelines(request: Request) -> Response:
        """Timelines of the last requests of the caller's key, newest first."""
        latest = services.timelines.latest(request.state.tenant)
        found = [timeline.as_dict() for timeline in latest]
        return Response(encode({"requests": found}), media_type=JSON)

    @router.get("/admin/requests/{request_id}")
    async def timeline(request: Request, request_id: str) -> Response:
        """The timeline of one of the last requests of the caller's key."""
        found = services.timelines.find(request_id, request.state.tenant)
        if found is None:
            raise RefusedError(
                f"There is no request {request_id[:128]!r} among the last ones. GET "
                "/admin/requests lists them.",
                status=404,
            )
        return Response(encode(found.as_dict()), media_type=JSON)
