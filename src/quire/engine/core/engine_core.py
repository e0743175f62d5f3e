"""The engine core: scheduler on one side, executor on the other, and a few steps between them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.errors import EngineError
from quire.executor import Executor, StepFuture
from quire.protocol.pins import PinnedPrefix
from quire.protocol.request import EngineOutput, EngineRequest
from quire.protocol.step import IntArray
from quire.scheduler import Scheduler, SchedulerStats

__all__ = ["EngineCore", "PlanObserver"]

PlanObserver = Callable[[npt.NDArray[np.int64]], None]
"""Takes the handles of the sequences that are running."""


class EngineCore:
    """Keeps up to `depth` steps in flight: step N + 1 is planned before the tokens of step N are
    known, so planning and output work hide behind the computation."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int = 2,
        on_plan: PlanObserver | None = None,
    ) -> None:
        """on_plan: told the handles of the running sequences before a step is executed."""
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._on_plan = on_plan
        self._in_flight: deque[StepFuture] = deque()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. RequestError if this engine could never serve it."""
        self._scheduler.add(request)

    def abort(self, handles: list[int]) -> None:
        """End sequences, whatever their state. Unknown or finished ones are ignored."""
        for handle in handles:
            self._scheduler.abort(handle)

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> None:
        """More of the prompt of an open request, and perhaps its end; see `Scheduler.extend`."""
        self._scheduler.extend(handle, token_ids, is_last=is_last)

    def awaits_prompt(self, handle: int) -> bool:
        """Whether this is an open request that may be extended; not once it has ended."""
        return self._scheduler.awaits_prompt(handle)

    @property
    def uses_priority(self) -> bool:
        """Whether requests may name a priority."""
        return self._scheduler.uses_priority

    @property
    def waits_for_input(self) -> bool:
        """Whether a step could do nothing before some prompt goes on."""
        return not self._in_flight and self._scheduler.waits_for_input

    def unpin(self, handle: int) -> bool:
        """Let the prefix go that this request pinned; whether there was one."""
        return self._scheduler.unpin(handle)

    def pins(self, now: float) -> tuple[PinnedPrefix, ...]:
        """The prefixes that are held."""
        return self._scheduler.pins(now)

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished or bool(self._in_flight)

    def step(self, now: float) -> EngineOutput:
        """Fill the pipeline, wait for its oldest step, and return what that gave to the clients."""
        while len(self._in_flight) < self._depth:
            plan = self._scheduler.plan(now)
            if plan is None:
                break
            if self._on_plan is not None:
                self._on_plan(self._scheduler.running_handles())
            self._in_flight.append(self._executor.execute(plan))
        if not self._in_flight:
            return self._flush()
        future = self._in_flight[0]
        try:
            result = future.result()
        except BaseException as error:
            if not future.done() or future.exception() is not error:
                raise  # Ctrl-C ended the wait, not the step: its result is still to come
            return self._lose_steps(error)  # whatever it was, the engine must go on
        self._in_flight.popleft()
        return self._scheduler.apply(result)

    def _flush(self) -> EngineOutput:
        output = self._scheduler.flush()
        if not output.finished and not self._scheduler.waits_for_input:
            raise EngineError(
                f"nothing can be planned although requests wait ({self._scheduler.stats()}): "
                "this is a fault of the scheduler, please report it"
            )
        return output

    def _lose_steps(self, error: BaseException) -> EngineOutput:
        """A step failed as a whole: end the requests that were in flight, keep the others."""
        for future in self._in_flight:
            with contextlib.suppress(Exception, SystemExit):
                future.result()  # steps after a lost one must have ended, whatever they gave
        self._in_flight.clear()
        return self._scheduler.fail_running(
            f"the engine lost the step that computed this request ({error}): send it again"
        )

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def check_invariants(self) -> None:
        """Raise EngineError if the bookkeeping is broken; for tests and debugging."""
        self._scheduler.check_invariants()

    def shutdown(self) -> None:
        """Let steps in flight end, and free the executor's resources."""
        self._in_flight.clear()
        self._executor.shutdown()
