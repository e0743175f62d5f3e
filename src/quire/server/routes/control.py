"""Routes that stop, empty and restart the engine, or replace its weights; open only behind a
switch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_args

import msgspec
from starlette.responses import Response

from quire.base.telemetry.flight.dump import collect, encode_dump
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
from quire.server.generation.weight_updates import BACKEND, HOW, WeightUpdates
from quire.server.requests.errors import RefusedError
from quire.server.requests.weight_bodies import (
    FinishWeightUpdate,
    InitWeightTransfer,
    UpdateWeights,
)
from quire.server.routes.route import BYTES, Access, Call, Needs, Query, Route

__all__ = ["ROUTES"]

Body = TypeVar("Body")
Made = TypeVar("Made")

LEVELS = ("1", "2")
MODES: tuple[PauseMode, ...] = get_args(PauseMode)

_LEVEL = Query("level", {"type": "string", "enum": list(LEVELS), "default": "1"})
_MODE = Query("mode", {"type": "string", "enum": list(MODES), "default": "abort"})
_RESET_RUNNING = Query("reset_running_requests", {"type": "string", "default": "false"})
_INCLUDE_DP = Query("include_dp", {"type": "string", "default": "true"})
_CONFIG_FORMAT = Query("config_format", {"type": "string", "default": "json"})
_INIT_OF_GPUS = (
    "master_address", "master_port", "rank_offset", "world_size", "packed", "group_name"
)  # fmt: skip
"""Fields of `init_info` with which vLLM's transports between GPUs begin."""


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


class WeightMessage(msgspec.Struct):
    message: str


class WeightsFinished(msgspec.Struct):
    """weight_version: label of outputs from now on."""

    message: str
    weight_version: str


class WeightInfo(msgspec.Struct):
    weight_version: str


class WorldSize(msgspec.Struct):
    """world_size: processes that hold weights."""

    world_size: int


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
    await _control(call, ResetPrefixCache(_flag(call, _RESET_RUNNING)))
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


async def init_weight_transfer_engine(call: Call[InitWeightTransfer]) -> WeightMessage:
    """Agree on a transport of weights: `file` is the one that this server has."""
    info = call.body.init_info
    for name in info:
        if name in _INIT_OF_GPUS:
            raise RefusedError(
                f"init_info.{name} asks for a transport between GPUs (NCCL or CUDA IPC), and this "
                f'server joins no group. Send {{"init_info": {{"backend": "{BACKEND}"}}}}. {HOW}',
                status=501,
                param="init_info",
            )
        if name != "backend":
            raise RefusedError(
                f"init_info has no field {name[:80]!r}. Send the backend alone.", param="init_info"
            )
    if (backend := info.get("backend", BACKEND)) != BACKEND:
        raise RefusedError(
            f"The backend {str(backend)[:80]!r} is not offered. Give {BACKEND!r}. {HOW}",
            status=501,
            param="init_info",
        )
    _updates(call)
    return WeightMessage("Weight transfer initialized")


async def shutdown_weight_transfer_engine(call: Call[None]) -> WeightMessage:
    """Drop the update that is open, if there is one."""
    await _updates(call).drop()
    return WeightMessage("Weight transfer shut down")


async def start_weight_update(call: Call[None]) -> WeightMessage:
    """Open an update of weights. One that was open is dropped."""
    await _updates(call).start()
    return WeightMessage("Weight update started")


async def update_weights(call: Call[UpdateWeights]) -> WeightMessage:
    """Add tensors to the update that is open. The engine checks them, and computes on with what it
    has until `/finish_weight_update`."""
    folder = call.services.settings.weights_folder
    await _updates(call).add(call.body.update_info, folder)
    return WeightMessage("Weights received")


async def finish_weight_update(call: Call[FinishWeightUpdate]) -> WeightsFinished:
    """Compute with the tensors of the update, on all replicas and ranks or on none. Open requests
    go on with them; cached prefixes are forgotten."""
    version, most = call.body.weight_version, call.limits.max_label_chars
    if version is not None and not (0 < len(version) <= most and version.isprintable()):
        raise RefusedError(
            f"weight_version is {version[:80]!r}. Give 1 to {most} printable characters.",
            param="weight_version",
        )
    return WeightsFinished("Weight update finished", await _updates(call).finish(version))


async def init_communicator(_: Call[None]) -> WeightMessage:
    """Refused: TRL's own server, up to TRL 1.12, joined a group of GPUs here."""
    raise _no_group("/init_communicator")


async def update_named_param(_: Call[None]) -> WeightMessage:
    """Refused: TRL announced a tensor here that came over a group of GPUs."""
    raise _no_group("/update_named_param")


async def batch_update_named_params(_: Call[None]) -> WeightMessage:
    """Refused: TRL announced tensors here that came over a group of GPUs."""
    raise _no_group("/batch_update_named_params")


async def close_communicator(_: Call[None]) -> WeightMessage:
    """Nothing to close: this server joins no group of GPUs."""
    return WeightMessage("No group of GPUs was open")


def _no_group(path: str) -> RefusedError:
    return RefusedError(
        f"{path} announces weights over a group of NCCL, and this server joins none. POST "
        f"/start_weight_update, /update_weights and /finish_weight_update instead. {HOW}",
        status=501,
    )


async def weight_info(call: Call[None]) -> WeightInfo:
    """The version of the weights that the engine computes with."""
    report = await call.services.backend.require_core().control(Inspect())
    return WeightInfo(report.weights.version)


async def get_world_size(call: Call[None]) -> WorldSize:
    """The number of processes that hold weights: ranks times replicas."""
    with_replicas = _flag(call, _INCLUDE_DP)
    num_ranks, num_replicas = _sizes(call)
    return WorldSize(num_ranks * (num_replicas if with_replicas else 1))


async def server_info(call: Call[None]) -> dict[str, Any]:
    """The part of vLLM's configuration that trainers read. `config_format` is `json` alone."""
    if _CONFIG_FORMAT.of(call.request) != "json":
        raise RefusedError("config_format is not 'json'. Give that.", param="config_format")
    ready = call.ready
    num_ranks, num_replicas = _sizes(call)
    return {
        "vllm_config": {
            "weight_transfer_config": {"backend": BACKEND},
            "model_config": {
                "model": ready.model.root,
                "max_model_len": ready.capacity.max_model_len,
                "logprobs_mode": ready.capacity.facts.program.get("logprobs_mode"),
            },
            "parallel_config": {
                "tensor_parallel_size": num_ranks,
                "data_parallel_size": num_replicas,
            },
        }
    }


async def collective_rpc(_: Call[None]) -> WeightMessage:
    """Refused: the engine runs no code that a request names."""
    raise RefusedError(
        "collective_rpc is not offered: the engine runs no method that a request names. POST "
        f"/start_weight_update, /update_weights and /finish_weight_update replace weights. {HOW}",
        status=501,
    )


def _updates(call: Call[Any]) -> WeightUpdates:
    return WeightUpdates(call.services.backend.require_core())


def _sizes(call: Call[None]) -> tuple[int, int]:
    """Return the ranks of one model, and the replicas."""
    client = call.services.backend.require_core()
    capacity = client.status.capacity
    return 1 if capacity is None else capacity.num_ranks, max(len(client.directories), 1)


async def _control(call: Call[None], op: AdminOp) -> Report:
    return await call.services.backend.require_core().control(op)


def _mode(call: Call[None]) -> PauseMode:
    name = _MODE.of(call.request) or ""
    for mode in MODES:
        if mode == name:
            return mode
    raise RefusedError(f"mode is {name[:64]!r}. Give one of: {', '.join(MODES)}.", param="mode")


def _flag(call: Call[None], query: Query) -> bool:
    given = (query.of(call.request) or "").lower()
    if given not in ("true", "false"):
        raise RefusedError(f"{query.name} is {given[:64]!r}. Give true or false.", param=query.name)
    return given == "true"


def _activity(report: Report) -> EngineActivity:
    return EngineActivity(report.sleep_level, report.is_paused)


def _route(
    method: str,
    path: str,
    handler: Callable[[Call[Body]], Awaitable[Made]],
    answer: type[Made] | None,
    *query: Query,
    refuses: tuple[int, ...] = (400, 503),
    **more: Any,
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
        refuses=refuses,
        **more,
    )


def _weights_route(
    method: str,
    path: str,
    handler: Callable[[Call[Body]], Awaitable[Made]],
    answer: type[Made] | None,
    *query: Query,
    **more: Any,
) -> Route[Any, Any]:
    return _route(method, path, handler, answer, *query, refuses=(400, 409, 501, 503), **more)


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
    _weights_route(
        "POST",
        "/init_weight_transfer_engine",
        init_weight_transfer_engine,
        WeightMessage,
        body=InitWeightTransfer,
    ),
    _weights_route(
        "POST", "/shutdown_weight_transfer_engine", shutdown_weight_transfer_engine, WeightMessage
    ),
    _weights_route("POST", "/start_weight_update", start_weight_update, WeightMessage),
    _weights_route("POST", "/update_weights", update_weights, WeightMessage, body=UpdateWeights),
    _weights_route(
        "POST",
        "/finish_weight_update",
        finish_weight_update,
        WeightsFinished,
        body=FinishWeightUpdate,
        may_lack_body=True,
    ),
    _weights_route("GET", "/weight_info", weight_info, WeightInfo),
    _weights_route("GET", "/get_world_size", get_world_size, WorldSize, _INCLUDE_DP),
    _weights_route("GET", "/server_info", server_info, None, _CONFIG_FORMAT, needs=Needs.ENGINE),
    _weights_route("POST", "/collective_rpc", collective_rpc, WeightMessage),
    _weights_route("POST", "/init_communicator", init_communicator, WeightMessage),
    _weights_route("POST", "/update_named_param", update_named_param, WeightMessage),
    _weights_route("POST", "/batch_update_named_params", batch_update_named_params, WeightMessage),
    _weights_route("POST", "/close_communicator", close_communicator, WeightMessage),
)
