"""The interface between plan and data: plans in, futures of results out, operations between
steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from quire.protocol.adapters import AdapterRef
from quire.protocol.block_moves import BlockMove, MoveOutcome
from quire.protocol.control import ControlOp, Report
from quire.protocol.media import MediaInfo
from quire.protocol.step import IntArray, LateInput, StepPlan, StepResult

__all__ = ["Executor", "StepFuture"]


class StepFuture(Protocol):
    """The result of a step that may still be computing. `concurrent.futures.Future` is one too."""

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for the result, for `timeout` seconds at most. Raises the error that ended the
        step."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception that ended the step, after the same wait as `result`; None if it has
        a result."""
        ...

    def done(self) -> bool:
        """Return True if `result` and `exception` would not wait."""
        ...


class Executor(Protocol):
    """Executes plans in the order given."""

    def start(self) -> Report:
        """Load the model and measure, once and before all other calls. Raises ConfigError, and
        leaves nothing behind, if it cannot be loaded as asked."""
        ...

    def control(self, op: ControlOp) -> Report:
        """Carry out an operation while no step is in flight. Raises the errors that the operation
        states."""
        ...

    def execute(self, plan: StepPlan) -> StepFuture:
        """Start a step and return at once.

        The future raises for a fault of the device or the engine. Then all steps in flight are
        lost, and the next plan must take all rows out. The result itself reports faults of single
        rows.
        """
        ...

    def put_media(self, handle: int, data: object) -> MediaInfo:
        """Take media for a request that will name `handle`; allowed while steps are in flight.

        data: an image, which is encoded before the call returns; or bytes of any format, and within
        one process a tensor or an array, of embeddings. Any thread may call it. Raises
        RequestError, and keeps nothing, if they cannot be read or are not what this model takes.
        """
        ...

    def drop_media(self, handles: Sequence[int]) -> None:
        """Forget media once the steps given so far have started. Unknown handles are ignored."""
        ...

    def put_adapter(self, slot: int, ref: AdapterRef) -> Future[None]:
        """Read an adapter, beside steps, for rows with `slot` + 1.

        Give no step with such rows before the future is done. The future raises RequestError, and
        leaves the slot as it was, for an adapter that cannot be used.
        """
        ...

    def move_blocks(self, move: BlockMove) -> Future[MoveOutcome]:
        """Start a move to the disk or back, beside steps, after the steps given so far have written
        their blocks. The future raises nothing of the disk: blocks are lost instead."""
        ...

    def cancel_move(self, ticket: int) -> None:
        """End a move as if all its blocks were lost, if it has not ended: soon its future is done,
        whatever the disk does, and nothing reads or writes its blocks any more."""
        ...

    def late(self, late: LateInput) -> None:
        """Give a step its late input, at any time before its result. The step waits for it without
        a limit. Repeated calls do no harm."""
        ...

    def made_drafts(self, step_id: int, *, wait: bool) -> Mapping[int, IntArray] | None:
        """Return the drafts by slot, made by a model, that the oldest unfinished step verifies for
        rows that await masks.

        None if they are not made yet; `wait` waits for them.
        """
        ...

    def shutdown(self) -> None:
        """Finish the steps in flight, then free all resources. Steps that await late input fail.
        May be called twice."""
        ...
