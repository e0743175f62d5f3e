"""Routes for operators: health, metrics, and timelines of requests."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

import quire
from quire.base.telemetry.engine_stats import EngineStats
from quire.protocol.receipts import Receipt
from quire.protocol.status import EngineState, EngineStatus, RequestFacts
from quire.server.openai.answer import encode
from quire.server.readings.prompt_memory import CacheVerdict
from quire.server.readings.short_status import ShortStatus, short_status
from quire.server.requests.errors import RefusedError
from quire.server.routes import exposition
from quire.server.routes.route import JSON, TEXT, Access, Call, Route

__all__ = ["ROUTES"]

_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Policy that browsers hold the page to: it asks this server alone."""

_HEALTHY = (EngineState.READY, EngineState.SLEEPING, EngineState.DRAINING)


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int
    waiting_requests: int
    waiting_tokens: int


class DiskCache(msgspec.Struct):
    """blocks: number that fits. cached: number that is there. read_s, write_s: threads' time."""

    blocks: int
    cached: int
    read_s: float
    write_s: float


class CacheReading(msgspec.Struct):
    """The KV cache. cached: blocks with a prefix that nothing else uses. pins: pinned prefixes.
    pinned: their blocks. queried_tokens, hit_tokens: prompt tokens, looked up and found. Loads
    count requests, all else counts blocks."""

    block_size: int
    blocks: int
    used: int
    cached: int
    pins: int
    pinned: int
    host_cached: int
    disk: DiskCache | None
    queried_tokens: int
    hit_tokens: int
    stored: int
    unstored: int
    loaded: int
    lost: int
    loads_started: int
    loads_declined: int
    loads_late: int


class CacheReason(msgspec.Struct):
    """Why tokens of a prompt were computed: hashes and counts. compared: id of the earlier request.
    token: number of the first token that differs. place, message, role: the part of the chat in
    which it lies."""

    kind: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_common_tokens: int
    num_reusable_tokens: int
    compared: str
    token: int | None
    place: str | None
    message: int | None
    role: str


class Explanation(msgspec.Struct):
    """sentences: why a request took its time. cache_sentences, cache: why its prompt was computed
    again; none for a request without text. engine: facts of each of its prompts."""

    request_id: str
    sentences: list[str]
    cache_sentences: list[str]
    cache: CacheReason | None
    engine: list[RequestFacts]


class TimelineList(msgspec.Struct):
    requests: list[dict[str, Any]]


class ReceiptList(msgspec.Struct):
    """One receipt for each prompt of a request. object: "list"."""

    data: list[Receipt]
    object: str = "list"


async def livez(call: Call[None]) -> Response:
    """200 while this process can serve, or may again: restart it otherwise."""
    return _probe(call, is_well=call.services.backend.status.state is not EngineState.DEAD)


async def health(call: Call[None]) -> Response:
    """200 while the engine makes progress."""
    return _probe(call, is_well=call.services.backend.status.state in _HEALTHY)


async def readyz(call: Call[None]) -> Response:
    """200 while new requests are taken."""
    return _probe(call, is_well=call.services.backend.status.state is EngineState.READY)


async def ping(call: Call[None]) -> Response:
    """200 while the engine makes progress, under the name that SageMaker asks for."""
    return await health(call)


def _probe(call: Call[None], *, is_well: bool) -> Response:
    status = short_status(call.services.backend.status)
    return Response(encode(status), 200 if is_well else 503, media_type=JSON)


async def show_version(_: Call[None]) -> Version:
    """The version of quire."""
    return Version(quire.__version__)


async def load(call: Call[None]) -> Load:
    """Requests that are open, and of these the ones that wait for the engine."""
    total = call.services.total()
    others = total.metrics.num_open_requests - 1  # without this one
    return Load(others, total.num_waiting_requests, total.num_waiting_tokens)


async def cache(call: Call[None]) -> CacheReading:
    """Blocks of the KV cache in memory and on disk, and what became of them."""
    client, capacity = call.services.backend.client, call.services.backend.status.capacity
    stats = EngineStats() if client is None else client.stats
    disk = None
    if stats.num_disk_blocks:
        disk = DiskCache(
            blocks=stats.num_disk_blocks,
            cached=stats.num_named_disk_blocks,
            read_s=stats.disk_read_seconds_total,
            write_s=stats.disk_write_seconds_total,
        )
    return CacheReading(
        block_size=0 if capacity is None else capacity.block_size,
        blocks=stats.num_blocks,
        used=stats.num_used_blocks,
        cached=stats.num_cached_blocks,
        pins=stats.num_pins,
        pinned=stats.num_pinned_blocks,
        host_cached=stats.num_named_host_blocks,
        disk=disk,
        queried_tokens=stats.prompt_tokens_total,
        hit_tokens=stats.cached_tokens_total,
        stored=stats.blocks_stored_total,
        unstored=stats.blocks_unstored_total,
        loaded=stats.blocks_loaded_total,
        lost=stats.blocks_lost_total,
        loads_started=stats.loads_started_total,
        loads_declined=stats.loads_declined_total,
        loads_late=stats.late_loads_total,
    )


async def metrics(call: Call[None]) -> Response:
    """In the text format of Prometheus."""
    return Response(exposition.text(call.services), media_type=exposition.MEDIA_TYPE)


async def status(call: Call[None]) -> EngineStatus:
    """The engine's state, the phases of its start, and its capacity."""
    return call.services.backend.status


async def timelines(call: Call[None]) -> TimelineList:
    """Timelines of the last requests of the caller's key, newest first."""
    latest = call.services.timelines.latest(call.tenant)
    return TimelineList([timeline.as_dict() for timeline in latest])


async def timeline(call: Call[None]) -> dict[str, Any]:
    """The timeline of one of the last requests of the caller's key."""
    request_id = call.part("request_id")
    found = call.services.timelines.find(request_id, call.tenant)
    if found is None:
        raise _unknown(request_id)
    shown = found.as_dict()
    verdict = await call.services.inquiry.verdict(found)
    if verdict is not None:
        shown["cache"] = _reason(verdict)
    return shown


async def explanation(call: Call[None]) -> Explanation:
    """Why a request of the caller's key was slow, and why its prompt was computed again, in words.
    The request may still run; its id or that of its answer names it."""
    services, name = call.services, call.part("request_id")
    timeline = services.timelines.named(name, call.tenant)
    if timeline is None:
        raise _unknown(name)
    found = await services.inquiry.about(timeline)
    verdict = found.verdict
    return Explanation(
        timeline.request_id,
        *found.sentences(timeline),
        None if verdict is None else _reason(verdict),
        list(found.facts),
    )


def _reason(verdict: CacheVerdict) -> CacheReason:
    place = verdict.place
    return CacheReason(
        verdict.kind.value,
        verdict.num_prompt,
        verdict.num_cached,
        verdict.num_common,
        verdict.num_reusable,
        verdict.compared,
        verdict.token,
        None if place is None else place.name,
        None if place is None else place.message,
        "" if place is None else place.role,
    )


def _unknown(request_id: str) -> RefusedError:
    return RefusedError(
        f"There is no request {request_id[:128]!r} among the last ones. GET "
        "/admin/requests lists them.",
        status=404,
    )


async def receipts(call: Call[None]) -> ReceiptList:
    """Receipts of a deterministic request of the caller's key, by its id or that of its
    response."""
    find = call.services.receipts.find
    return ReceiptList(await asyncio.to_thread(find, call.part("receipt_id"), call.tenant))


async def docs(_: Call[None]) -> Response:
    """A page of all routes, which loads nothing from elsewhere."""
    headers = {"content-security-policy": _PAGE_POLICY}
    return Response(_page(), headers=headers, media_type="text/html; charset=utf-8")


@functools.cache
def _page() -> bytes:
    return Path(__file__).with_name("docs.html").read_bytes()


_PROBE = (200, 503)

ROUTES: tuple[Route[Any, Any], ...] = (
    Route("GET", "/livez", livez, answer=ShortStatus, access=Access.ANYONE, statuses=_PROBE),
    Route("GET", "/health", health, answer=ShortStatus, access=Access.ANYONE, statuses=_PROBE),
    Route("GET", "/readyz", readyz, answer=ShortStatus, access=Access.ANYONE, statuses=_PROBE),
    Route("GET", "/ping", ping, answer=ShortStatus, statuses=_PROBE, is_listed=False),
    Route("POST", "/ping", ping, answer=ShortStatus, statuses=_PROBE, is_listed=False),
    Route("GET", "/version", show_version, answer=Version),
    Route("GET", "/load", load, answer=Load),
    Route("GET", "/cache", cache, answer=CacheReading),
    Route("GET", "/metrics", metrics, answer=str, media=TEXT),
    Route("GET", "/admin/status", status, answer=EngineStatus),
    Route("GET", "/admin/requests", timelines, answer=TimelineList),
    Route("GET", "/admin/requests/{request_id}", timeline),
    Route("GET", "/admin/requests/{request_id}/explanation", explanation, answer=Explanation),
    Route("GET", "/receipts/{receipt_id}", receipts, answer=ReceiptList, refuses=(404,)),
    Route("GET", "/docs", docs, media="text/html", is_listed=False),
)
