"""The door through which fronts use the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from quire.base.platform.interrupts import held
from quire.base.telemetry.engine_stats import SchedulerStats
from quire.engine.core.engine_core import EngineCore
from quire.protocol.control import ControlOp, Report
from quire.protocol.media import MediaInfo
from quire.protocol.request import EngineOutput, EngineRequest

__all__ = ["EngineClient", "InProcessClient"]


class EngineClient(Protocol):
    """A front's view of an engine, wherever that runs."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. RequestError if this engine could never serve it."""
        ...

    def put_media(self, handle: int, data: object) -> MediaInfo:
        """Give the engine media that requests will name by `handle`, a number that no request has.
        RequestError as of `Executor.put_media`."""
        ...

    def drop_media(self, handles: Sequence[int]) -> None:
        """Take media back that no request names any more, unless it has ended."""
        ...

    def abort(self, handles: Sequence[int]) -> None:
        """End sequences; unknown or finished ones are ignored."""
        ...

    def is_ready_for(self, op: ControlOp) -> bool:
        """Return whether `control` may follow: not while a pause waits for requests to end. Until
        it may, no new request is admitted, and steps go on."""
        ...

    def stop_waiting(self) -> None:
        """The operation that `is_ready_for` was asked about never follows."""
        ...

    def control(self, op: ControlOp) -> Report:
        """Carry out an operation between steps, when `is_ready_for` it. Raises what the operation
        says of itself."""
        ...

    @property
    def report(self) -> Report:
        """The state of the engine."""
        ...

    @property
    def waits_for_input(self) -> bool:
        """True if a step could do nothing before some open prompt goes on."""
        ...

    def step(self) -> EngineOutput:
        """Wait for the next output. Empty when nothing is left to do."""
        ...

    @property
    def has_unfinished(self) -> bool: ...

    def stats(self) -> SchedulerStats: ...

    def shutdown(self) -> None:
        """Free everything. May be called twice."""
        ...


class InProcessClient:
    """The core in the caller's process and thread; steps run when the caller asks for output.

    Ctrl-C waits for the end of each call, but for the wait for a step.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def add(self, request: EngineRequest) -> None:
        with held():
            self._core.add(request)

    def put_media(self, handle: int, data: object) -> MediaInfo:
        with held():
            return self._core.put_media(handle, data)

    def drop_media(self, handles: Sequence[int]) -> None:
        with held():
            self._core.drop_media(handles)

    def abort(self, handles: Sequence[int]) -> None:
        with held():
            self._core.abort(list(handles))

    def is_ready_for(self, op: ControlOp) -> bool:
        return self._core.is_ready_for(op)

    def stop_waiting(self) -> None:
        self._core.stop_waiting()

    def control(self, op: ControlOp) -> Report:
        with held():
            return self._core.control(op, time.monotonic())

    @property
    def report(self) -> Report:
        return self._core.report

    @property
    def waits_for_input(self) -> bool:
        return self._core.waits_for_input

    def step(self) -> EngineOutput:
        with held():
            return self._core.step(time.monotonic())

    @property
    def has_unfinished(self) -> bool:
        return self._core.has_unfinished

    def stats(self) -> SchedulerStats:
        return self._core.stats()

    def shutdown(self) -> None:
        self._core.shutdown()
