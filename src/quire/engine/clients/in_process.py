"""The door through which fronts use the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from quire.engine.core.engine_core import EngineCore
from quire.protocol.pins import PinnedPrefix
from quire.protocol.request import EngineOutput, EngineRequest
from quire.protocol.step import IntArray
from quire.scheduler import SchedulerStats

__all__ = ["EngineClient", "InProcessClient"]


class EngineClient(Protocol):
    """What a front may ask of an engine, wherever that runs."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. RequestError if this engine could never serve it."""
        ...

    def abort(self, handles: Sequence[int]) -> None:
        """End sequences; unknown or finished ones are ignored."""
        ...

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> None:
        """More of the prompt of an open request, and perhaps its end. RequestError if it is not
        open or grows too long; one that has ended is ignored."""
        ...

    def awaits_prompt(self, handle: int) -> bool:
        """Whether this is an open request that may be extended; not once it has ended."""
        ...

    @property
    def waits_for_input(self) -> bool:
        """Whether a step could do nothing before some open prompt goes on."""
        ...

    def unpin(self, handle: int) -> bool:
        """Let the prefix go that this request pinned; whether there was one."""
        ...

    def pins(self) -> tuple[PinnedPrefix, ...]:
        """The prefixes that are held."""
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
    """The core in the caller's process and thread; steps run when the caller asks for output."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def add(self, request: EngineRequest) -> None:
        self._core.add(request)

    def abort(self, handles: Sequence[int]) -> None:
        self._core.abort(list(handles))

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> None:
        self._core.extend(handle, token_ids, is_last=is_last)

    def awaits_prompt(self, handle: int) -> bool:
        return self._core.awaits_prompt(handle)

    @property
    def waits_for_input(self) -> bool:
        return self._core.waits_for_input

    def unpin(self, handle: int) -> bool:
        return self._core.unpin(handle)

    def pins(self) -> tuple[PinnedPrefix, ...]:
        return self._core.pins(time.monotonic())

    def step(self) -> EngineOutput:
        return self._core.step(time.monotonic())

    @property
    def has_unfinished(self) -> bool:
        return self._core.has_unfinished

    def stats(self) -> SchedulerStats:
        return self._core.stats()

    def shutdown(self) -> None:
        self._core.shutdown()
