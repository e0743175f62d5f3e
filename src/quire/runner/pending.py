"""Launched steps, for which the executor waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from quire.protocol.step import IntArray, RowFailure, StepResult
from quire.runner.rows import Slots

__all__ = ["DrawnStep", "FinishedStep", "PendingStep"]


class PendingStep(Protocol):
    """A step that was launched."""

    @property
    def is_over(self) -> bool:
        """True if `result` returns at once."""
        ...

    def result(self) -> StepResult:
        """Wait for the step. Another thread than the launching one may call this, also while that
        one launches the next step. Raises what ended the step as a whole."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A `PendingStep` whose result is ready."""

    step: StepResult
    is_over: bool = True

    def result(self) -> StepResult:
        """Return the result at once."""
        return self.step


class DrawnStep(NamedTuple):
    """A finished `PendingStep` whose rows drew tokens and gave nothing else. The caller of `result`
    builds the result, while the launching thread goes on with the next step. num_drafts: see
    `StepResult`."""

    step_id: int
    slots: Slots
    token_ids: list[int]
    failed: list[RowFailure]
    num_drafts: IntArray | None = None
    is_over: bool = True

    def result(self) -> StepResult:
        """Return the result at once."""
        slots, token_ids = self.slots.astype(np.int32), np.array(self.token_ids, np.int32)
        failed = tuple(self.failed)
        return StepResult(self.step_id, slots, token_ids, failed=failed, num_drafts=self.num_drafts)
