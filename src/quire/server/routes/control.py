"""Routes that stop, empty and restart the engine; open only behind a switch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args

import msgspec
from starlette.responses import Response

from quire.protocol.control import (
    AdminOp,
    Inspect,
    Pause,
    PauseMode,
    Report,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from quire.server.requests.errors import RefusedError
from quire.server.routes.route import BYTES, Access, Call, Query, Route
from quire.telemetry.flight.dump import collect, encode_dump

__all__ = ["ROUTES"]

Made = TypeVar("Made")

LEVELS = ("1", "2")
MODES: tuple[PauseMode, ...] = get_args(PauseMode)

_LEVEL = Query("level", {"type": "string", "enum": list(LEVELS), "default": "1"})
_MODE = Query("mode", {"type": "string", "enum": list(MODES), "default": "abort"})
_RESET_RUNNING = Query("reset_running_requests", {"type": "string", "default": "false"})


class EngineActivity(msgspec.Struct):
    sleep_level: int
    is_paused: bool


class IsSleeping(msgspec.Struct):
    is_sleeping: bool


class IsPaused(msgspec.Struct):
    is_paused: bool


class CacheReset(msgspec.Struct):
    success: bool


class ProfileStart(msgspec.Struct):
    """directory: folder for the recording, on the server."""

    directory: str


class ProfileEnd(msgspec.Struct):
    """file: the recording, on the server."""

    file: str


async def sleep(call: Call[None]) -> EngineActivity:
    """Give memory back: the KV cache at level 1, the weights too at level 2."""
    level = _LEVEL.of(call.request) or ""
    if level not in LEVELS:
        raise RefusedError(f"level is {level[:64]!r}. Give 1 or 2.", param="level")
    return _activity(await _control(call, Sleep(int(level), _mode(call))))


async def wake_up(call: Call[None]) -> EngineActivity:
    """Take memory again, and serve."""
    return _activity(await _control(call, Wake()))


async def is_sleeping(call: Call[None]) -> IsSleeping:
    """Tell whether requests are refused until `/wake_up`."""
    return IsSleeping((await _control(call, Inspect())).sleep_level > 0)


async def pause(call: Call[None]) -> EngineActivity:
    """Compute nothing until `/resume`; new requests wait."""
    return _activity(await _control(call, Pause(_mode(call))))


async def resume(call: Call[None]) -> EngineActivity:
    """Go on after `/pause`."""
    return _activity(await _control(call, Resume()))


async def is_paused(call: Call[None]) -> IsPaused:
    """Tell whether computing is paused at the moment."""
    return IsPaused((await _control(call, Inspect())).is_paused)


async def reset_prefix_cache(call: Call[None]) -> CacheReset:
    """Forget cached prefixes, but for pinned ones."""
    flag = (_RESET_RUNNING.of(call.request) or "").lower()
    if flag not in ("true", "false"):
        raise RefusedError(
            f"reset_running_requests is {flag[:64]!r}. Give true or false.",
            param="reset_running_requests",
        )
    await _control(call, ResetPrefixCache(flag == "true"))
    return CacheReset(success=True)


async def start_profile(call: Call[None]) -> ProfileStart:
    """Record what steps do, until `/stop_profile`."""
    directory = call.services.settings.profile_dir
    await _control(call, StartProfile(directory))
    return ProfileStart(directory)


async def stop_profile(call: Call[None]) -> ProfileEnd:
    """Write the recording to a file on the server, in Chrome's trace format."""
    return ProfileEnd((await _control(call, StopProfile())).profile)


async def flight(call: Call[None]) -> Response:
    """A dump of the flight recorder: the last steps, and the stacks of all processes. The engine
    is not asked, so one that hangs is shown too."""
    client = call.services.backend.client
    directories = () if client is None else client.directories
    name = call.services.name
    dump = await asyncio.to_thread(collect, "route: GET /debug/flight", name, directories)
    headers = {"content-disposition": 'attachment; filename="flight.bin"'}
    return Response(await asyncio.to_thread(encode_dump, dump), headers=headers, media_type=BYTES)


async def _control(call: Call[None], op: AdminOp) -> Report:
    return await call.services.backend.require_core().control(op)


def _mode(call: Call[None]) -> PauseMode:
    name = _MODE.of(call.request) or ""
    for mode in MODES:
        if mode == name:
            return mode
    raise RefusedError(f"mode is {name[:64]!r}. Give one of: {', '.join(MODES)}.", param="mode")


def _activity(report: Report) -> EngineActivity:
    return EngineActivity(report.sleep_level, report.is_paused)


def _route(
    method: str,
    path: str,
    handler: Callable[[Call[None]], Awaitable[Made]],
    answer: type[Made],
    *query: Query,
) -> Route[Any, Any]:
    """Return a route under vLLM's name. It acts on the engine, and so on the requests of all
    keys."""
    return Route(
        method,
        path,
        handler,
        answer=answer,
        access=Access.ENGINE_CONTROL,
        query=query,
        refuses=(400, 503),
    )


ROUTES: tuple[Route[Any, Any], ...] = (
    _route("POST", "/sleep", sleep, EngineActivity, _LEVEL, _MODE),
    _route("POST", "/wake_up", wake_up, EngineActivity),
    _route("GET", "/is_sleeping", is_sleeping, IsSleeping),
    _route("POST", "/pause", pause, EngineActivity, _MODE),
    _route("POST", "/resume", resume, EngineActivity),
    _route("GET", "/is_paused", is_paused, IsPaused),
    _route("POST", "/reset_prefix_cache", reset_prefix_cache, CacheReset, _RESET_RUNNING),
    _route("POST", "/start_profile", start_profile, ProfileStart),
    _route("POST", "/stop_profile", stop_profile, ProfileEnd),
    Route("GET", "/debug/flight", flight, access=Access.ENGINE_CONTROL, media=BYTES),
)
