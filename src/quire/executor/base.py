"""The doors between plan and data: plans in, futures of results out; operations between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from quire.protocol.adapters import AdapterRef
from quire.protocol.control import ControlOp, Report
from quire.protocol.media import MediaInfo
from quire.protocol.step import IntArray, LateInput, StepPlan, StepResult

__all__ = ["Executor", "StepFuture"]


class StepFuture(Protocol):
    """A step whose result is there or still to come; `concurrent.futures.Future` is one too."""

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for it, for so many seconds at most. Raises what ended the step."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception that ended the step, after the same wait as `result`; None if it has
        a result."""
        ...

    def done(self) -> bool:
        """Return whether `result` and `exception` would return at once."""
        ...


class Executor(Protocol):
    """Executes plans in the order in which they are given."""

    def start(self) -> Report:
        """Load the model and measure, once, before all else. ConfigError if it cannot be loaded as
        asked; nothing is left behind then."""
        ...

    def control(self, op: ControlOp) -> Report:
        """Carry out an operation while no step is in flight. Raises what it says of itself."""
        ...

    def execute(self, plan: StepPlan) -> StepFuture:
        """Start a step and return at once. The future raises on a fault of the device or the
        engine; then no step given so far counts, and the next plan takes all rows out. A fault of
        one row is in the result."""
        ...

    def put_media(self, handle: int, data: object) -> MediaInfo:
        """Take media of requests that will name `handle`, also while steps are in flight. data:
        bytes, whatever is in them; within one process also a tensor or an array. RequestError if
        they cannot be read, or are not what this model takes; nothing is kept then."""
        ...

    def drop_media(self, handles: Sequence[int]) -> None:
        """Forget media once the steps that were given so far have started. Unknown handles are
        ignored."""
        ...

    def put_adapter(self, slot: int, ref: AdapterRef) -> Future[None]:
        """Read an adapter, beside steps, and have rows with `slot` + 1 compute with it. No step
        that was not given yet may have such rows before the future is done. It raises RequestError
        for an adapter that cannot be used; then the slot is as it was."""
        ...

    def late(self, late: LateInput) -> None:
        """Hand over what a step awaits that was given to `execute`, at any time before its result
        is there. A step waits for it without a limit; more than once is no harm."""
        ...

    def made_drafts(self, step_id: int, *, wait: bool) -> Mapping[int, IntArray] | None:
        """Return the drafts that a step verifies where its plan left them to a model, by slot, of
        rows that await masks. None if they are not made yet; wait: until they are. For the oldest
        step whose result is not there."""
        ...

    def shutdown(self) -> None:
        """Finish what was started, then free all resources. Steps that await late input fail.
        May be called twice."""
        ...
