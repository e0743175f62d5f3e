"""Routes that stop, empty and restart the engine; open only behind a switch."""

from __future__ import annotations

from typing import get_args

from fastapi import APIRouter
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
from quire.server.openai.answer import encode
from quire.server.requests.errors import RefusedError
from quire.server.routes.services import Services

__all__ = ["control_router"]

JSON = "application/json"

LEVELS = ("1", "2")
MODES: tuple[PauseMode, ...] = get_args(PauseMode)


def control_router(services: Services) -> APIRouter:
    """vLLM's names. Each acts on the engine, and so on the requests of all keys."""
    router = APIRouter(tags=["operations"])

    async def control(op: AdminOp) -> Report:
        return await services.backend.require_core().control(op)

    @router.post("/sleep")
    async def sleep(level: str = "1", mode: str = "abort") -> Response:
        """Give memory back: the KV cache at level 1, the weights too at level 2."""
        if level not in LEVELS:
            raise RefusedError(f"level is {level[:64]!r}. Give 1 or 2.", param="level")
        return _state(await control(Sleep(int(level), _mode(mode))))

    @router.post("/wake_up")
    async def wake_up() -> Response:
        """Take memory again, and serve."""
        return _state(await control(Wake()))

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        """Tell whether requests are refused until `/wake_up`."""
        return _answer({"is_sleeping": (await control(Inspect())).sleep_level > 0})

    @router.post("/pause")
    async def pause(mode: str = "abort") -> Response:
        """Compute nothing until `/resume`; new requests wait."""
        return _state(await control(Pause(_mode(mode))))

    @router.post("/resume")
    async def resume() -> Response:
        """Go on after `/pause`."""
        return _state(await control(Resume()))

    @router.get("/is_paused")
    async def is_paused() -> Response:
        """Tell whether computing is paused at the moment."""
        return _answer({"is_paused": (await control(Inspect())).is_paused})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: str = "false") -> Response:
        """Forget cached prefixes, but for pinned ones."""
        flag = reset_running_requests.lower()
        if flag not in ("true", "false"):
            raise RefusedError(
                f"reset_running_requests is {flag[:64]!r}. Give true or false.",
                param="reset_running_requests",
            )
        await control(ResetPrefixCache(flag == "true"))
        return _answer({"success": True})

    _add_profile(router, services)
    return router


def _add_profile(router: APIRouter, services: Services) -> None:
    @router.post("/start_profile")
    async def start_profile() -> Response:
        """Record what steps do, until `/stop_profile`."""
        directory = services.settings.profile_dir
        await services.backend.require_core().control(StartProfile(directory))
        return _answer({"directory": directory})

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        """Write the recording to a file on the server, in Chrome's trace format."""
        report = await services.backend.require_core().control(StopProfile())
        return _answer({"file": report.profile})


def _mode(name: str) -> PauseMode:
    for mode in MODES:
        if mode == name:
            return mode
    raise RefusedError(f"mode is {name[:64]!r}. Give one of: {', '.join(MODES)}.", param="mode")


def _state(report: Report) -> Response:
    return _answer({"sleep_level": report.sleep_level, "is_paused": report.is_paused})


def _answer(found: dict[str, object]) -> Response:
    return Response(encode(found), media_type=JSON)
