"""Launched steps, for which the executor waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from quire.compute.runner.rows import Slots
from quire.protocol.step import IntArray, RowFailure, StepResult, TokenLogprobs

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
    """A finished `PendingStep` whose rows drew tokens by a graph. The caller of `result` builds the
    result, while the launching thread goes on with the next step. num_drafts, logprobs: see
    `StepResult`."""

    step_id: int
    slots: Slots
    token_ids: list[int]
    failed: list[RowFailure]
    num_drafts: IntArray | None = None
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = MappingProxyType({})
    is_over: bool = True

    def result(self) -> StepResult:
        """Return the result at once."""
        return StepResult(
            self.step_id,
            self.slots.astype(np.int32),
            np.array(self.token_ids, np.int32),
            logprobs=dict(self.logprobs),
            failed=tuple(self.failed),
            num_drafts=self.num_drafts,
        )
