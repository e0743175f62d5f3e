"""Snapshots for the page: figures of the engine and the server, and the requests of one key."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import quire
from quire.base.errors import QuireError
from quire.base.telemetry import EngineStats
from quire.engine.clients.async_client import AsyncEngineClient
from quire.protocol.control import Inspect, MapBlocks
from quire.protocol.status import EngineView, ViewedGroup
from quire.server.generation.backend import Backend
from quire.server.openai.answer import encode
from quire.server.readings.metrics import ServerMetrics
from quire.server.readings.timeline import Timeline, TimelineLog
from quire.server.settings import ServerSettings

if TYPE_CHECKING:
    from quire.server.routes.services import Services

_Json = dict[str, Any]

__all__ = ["EngineLook", "difference", "request_rows", "run_lengths", "snapshot"]

NUM_ENDED = 30
"""Requests that have ended and are shown."""

NUM_OPEN = 100
"""Open requests that are shown, of the oldest and of the newest each."""

MAP_SHARE = 0.005
"""Share of a core's time that maps may take: with many blocks or requests they come less often."""

RAREST_MAP_S = 60.0
"""Longest time between two maps: one that took long by chance delays the next no further."""

PATIENCE_S = 0.1

OVERLAP_S, LONGEST_S = 0.5, 60.0
"""Seconds by which two answers overlap in their steps, and that an answer goes back at most."""

MAX_STEPS = 256
"""Steps of a core that a snapshot has."""

_RUNS = re.compile(r"(.)\1*")
_SECRET = frozenset({"api_key", "api_key_weights", "limits", "otlp_traces_endpoint"})
_HISTOGRAMS = {
    "ttft": "time_to_first_token",
    "itl": "inter_token_latency",
    "e2e": "e2e_latency",
    "queue": "queue_time",
}


class EngineLook:
    """Readings of the engine that callers of all keys see. They are taken while somebody looks, and
    no more often for several viewers than for one."""

    def __init__(self) -> None:
        self._shared: dict[str, Any] = {}
        self._read_s = 0.0
        self._plan = ""
        self._view = EngineView()
        self._shown: _Json = _view("", self._view, {})
        self._steps: dict[str, list[float]] = {}
        self._framed: _Json = {}
        self._frames: dict[str | None, _Json] = {}
        self._patches: dict[int, tuple[_Json, _Json, bytes]] = {}
        self._asked_s = -math.inf
        self._told_s = -LONGEST_S
        self._restarts = -1
        self._asking: asyncio.Task[None] | None = None

    async def read(self, services: Services, max_age_s: float) -> dict[str, Any]:
        """Return a reading that is no older than `max_age_s`, without values that are None."""
        if not self._shared or time.monotonic() - self._read_s > max_age_s:
            seen = self._read_s
            await self._ask_core(services.backend, max_age_s)
            if self._read_s != seen:
                return self._shared  # another viewer waited for the same answer
            self._shared = {**_without_none(_shared(services, self._plan)), **self._shown}
            self._read_s = time.monotonic()
        return self._shared

    async def _ask_core(self, backend: Backend, max_age_s: float) -> None:
        """Ask for the plan and the map of blocks. A core that is busy is waited for no longer than
        `PATIENCE_S`: then the last answer stays."""
        client, status = backend.client, backend.status
        if client is None or status.capacity is None:
            return
        is_known = status.restarts == self._restarts  # otherwise the map is of a dead core
        rest_s = min(self._view.took_s / MAP_SHARE, RAREST_MAP_S) if is_known else 0.0
        every_s = max(max_age_s, rest_s)
        is_due = time.monotonic() - self._asked_s >= every_s
        if is_due and (self._asking is None or self._asking.done()):
            self._asked_s = time.monotonic()
            self._asking = asyncio.create_task(self._ask(client, status.restarts))
        if self._asking is not None:
            await asyncio.wait((self._asking,), timeout=PATIENCE_S)

    async def _ask(self, client: AsyncEngineClient, restarts: int) -> None:
        # A core that sleeps, restarts or stops cannot answer.
        with contextlib.suppress(QuireError):
            if restarts != self._restarts:
                self._plan = (await client.control(Inspect())).plan
                self._restarts = restarts
            age_s = max(time.monotonic() - self._told_s, _since_known(self._view, self._steps))
            age_s += OVERLAP_S
            report = await client.control(MapBlocks(steps_s=min(age_s, LONGEST_S)))
            self._told_s = time.monotonic()
            self._view = report.view or EngineView()
            self._steps = _steps(self._view, self._steps)
            self._shown = _view(run_lengths(report.blocks), self._view, self._steps)

    def frame(self, shared: _Json, tenant: str | None) -> _Json | None:
        """Return the frame that was made of this reading for a tenant, if one was."""
        return self._frames.get(tenant) if shared is self._framed else None

    def keep_frame(self, shared: _Json, tenant: str | None, frame: _Json) -> None:
        """Let other viewers of the tenant have a frame while the reading is the newest."""
        if shared is not self._framed:
            self._framed, self._frames, self._patches = shared, {}, {}
        self._frames[tenant] = frame

    def patch(self, old: _Json, new: _Json) -> bytes:
        """Return the difference between two frames as JSON; made once for all viewers that have
        these."""
        known = self._patches.get(id(new))
        if known is None or known[0] is not old or known[1] is not new:
            known = self._patches[id(new)] = (old, new, encode(difference(old, new)))
        return known[2]

    @property
    def groups(self) -> tuple[ViewedGroup, ...]:
        """The groups of the last reading, of all tenants."""
        return self._view.groups


async def snapshot(
    services: Services, tenant: str | None, max_age_s: float = 0.0
) -> dict[str, Any]:
    """Return all that the page shows a caller, without values that are None. tenant: name of the
    caller's key; None shows the requests of all."""
    look = services.look
    shared = await look.read(services, max_age_s)
    frame = look.frame(shared, tenant)
    if frame is None:
        frame = {
            **shared,
            "at": round(time.time(), 3),
            "groups": {str(each.number): _group(each, tenant) for each in look.groups},
            "requests": request_rows(services.timelines, tenant),
        }
        look.keep_frame(shared, tenant, frame)
    return frame


def _group(group: ViewedGroup, tenant: str | None) -> dict[str, Any]:
    """Return a request in the engine; only callers of its own key see its id."""
    found: dict[str, Any] = {"blocks": group.num_blocks}
    if tenant in (None, group.tenant):
        found["id"] = group.request_id
    if group.waits:
        found |= {"waits": group.waits, "tokens": group.num_tokens}
    return found


def _view(runs: str, view: EngineView, steps: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "blocks": runs,
        "owners": ",".join(f"{number}x{length}" for number, length in view.owners),
        "evicted": list(view.evicted),
        "steps": steps,
        "hidden_groups": view.num_hidden,
        "prefixes": [
            {
                "parent": each.parent,
                "tokens": each.num_tokens,
                "sequences": each.num_sequences,
                "pins": each.num_pins,
                "groups": list(each.groups),
            }
            for each in view.prefixes
        ],
    }


def _since_known(view: EngineView, known: Mapping[str, list[float]]) -> float:
    """Return the seconds since the plan of the newest known step, of the core where that is longest
    ago; `LONGEST_S` if a core has none. Each later step was planned after it, however long it took.
    """
    newest: dict[str, float] = {}
    for name, (at, *_) in known.items():
        core = name.partition(".")[0]
        newest[core] = max(at, newest.get(core, at))
    if len(newest) < len(view.steps):
        return LONGEST_S
    return max(0.0, time.time() - min(newest.values(), default=math.inf))


def _steps(view: EngineView, known: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return steps by core and number: time of the plan, tokens behind prompts, of prompts, drafts
    accepted and wasted, rows, and milliseconds. A step that is `known` stays as it was."""
    found = dict(known)
    now = time.time()
    for core, steps in enumerate(view.steps):
        for step in steps:
            name = f"{core}.{step.number}"
            at = round(now - step.age_s, 3)
            if name in known and abs(known[name][0] - at) < OVERLAP_S:
                continue
            found.pop(name, None)  # of a core before this one
            tokens = (step.decode, step.prefill, step.accepted, step.wasted)
            found[name] = [at, *tokens, step.rows, step.ms]
    num_old = len(found) - MAX_STEPS * max(len(view.steps), 1)
    return dict(islice(found.items(), max(num_old, 0), None))


def _shared(services: Services, plan: str) -> dict[str, Any]:
    backend = services.backend
    client, status, model = backend.client, backend.status, backend.model
    total = services.total()
    adapters = [] if model is None or model.adapters is None else model.adapters.names
    return {
        "server": {
            "version": quire.__version__,
            "started_at": services.started_at,
            "fronts": services.settings.api_server_count,
        },
        "model": None
        if model is None
        else {
            "names": list(model.names),
            "root": model.root if _shows_settings(services.settings) else None,
            "adapters": list(adapters),
        },
        "status": {**asdict(status), "state": status.state.value},
        "engine": asdict(EngineStats() if client is None else client.stats),
        "front": {
            **_counts(total.metrics),
            "waiting_requests": total.num_waiting_requests,
            "waiting_tokens": total.num_waiting_tokens,
            "refused": total.refused,
        },
        "latency": {name: _histogram(total.metrics, of) for name, of in _HISTOGRAMS.items()},
        "plan": plan,
        "settings": _settings(services.settings),
    }


def _counts(metrics: ServerMetrics) -> dict[str, Any]:
    return {
        "open_requests": metrics.num_open_requests,
        "prompt_tokens": metrics.prompt_tokens,
        "generation_tokens": metrics.generation_tokens,
        "finished": metrics.finished,
    }


def _histogram(metrics: ServerMetrics, name: str) -> dict[str, Any]:
    found = getattr(metrics, name)
    return {"bounds": list(found.bounds), "counts": list(found.counts), "total": found.total}


def request_rows(timelines: TimelineLog, tenant: str | None) -> dict[str, Any]:
    """Return rows of open requests and of the last ones that ended, by their numbers. However many
    are open, a snapshot has at most 2 · `NUM_OPEN` of them. tenant: None for all."""
    ended = reversed(list(islice(timelines.latest(tenant), NUM_ENDED)))
    opened = timelines.open(tenant)
    shown = [*ended, *opened[:NUM_OPEN], *opened[NUM_OPEN:][-NUM_OPEN:]]
    return {str(each.number): _without_none(_row(each)) for each in shown}


def _row(timeline: Timeline) -> dict[str, Any]:
    """Return a request for the waterfall; times in milliseconds since its arrival."""
    is_over = timeline.finished_s is not None
    times = {
        name: getattr(timeline, f"{name}_s")
        for name in ("rendered", "queued", "scheduled", "first_token", "finished")
    }
    return {
        "id": timeline.request_id,
        "route": timeline.route,
        "at": round(timeline.arrived_at, 3),
        **{name: None if at is None else round(1000 * at, 1) for name, at in times.items()},
        "prompt": timeline.num_prompt_tokens,
        "cached": timeline.num_cached_tokens,
        "tokens": timeline.num_generation_tokens if is_over else timeline.num_chunk_tokens,
        "reason": timeline.finish_reason,
        "error": timeline.error,
    }


def _shows_settings(settings: ServerSettings) -> bool:
    """Return whether callers see the server's settings. With several keys their holders do not."""
    return len(settings.api_key) <= 1


def _settings(settings: ServerSettings) -> dict[str, Any]:
    if not _shows_settings(settings):
        return {}
    shown = [item.name for item in fields(settings) if item.name not in _SECRET]
    return {name: getattr(settings, name) for name in shown}


def run_lengths(letters: bytes) -> str:
    """Return runs of equal letters, each as its letter and length: "f12u3"."""
    runs = _RUNS.finditer(letters.decode("ascii"))
    return "".join(f"{run[1]}{run.end() - run.start()}" for run in runs)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch (RFC 7396) that makes `new` of `old`: null deletes, and objects are
    merged."""
    found: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        if name not in old:
            found[name] = value
            continue
        was = old[name]
        if was is value or was == value:
            continue
        if isinstance(was, dict) and isinstance(value, dict):
            found[name] = difference(cast("_Json", was), cast("_Json", value))
        else:
            found[name] = value
    return found


def _without_none(value: Any) -> Any:
    """Return `value` without entries that are None, since a merge patch has none."""
    if not isinstance(value, dict):
        return value
    entries = cast("_Json", value).items()
    return {name: _without_none(each) for name, each in entries if each is not None}
