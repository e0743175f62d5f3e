"""A step that also started work under tickets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.compute.runner.pending import PendingStep
from quire.protocol.step import StepResult, TicketFailure

__all__ = ["TicketedStep"]


@dataclass(frozen=True, slots=True)
class TicketedStep:
    """A `PendingStep` with the tickets that ended with it."""

    step: PendingStep
    done: tuple[int, ...]
    failed: tuple[TicketFailure, ...]

    @property
    def is_over(self) -> bool:
        return self.step.is_over

    def result(self) -> StepResult:
        """Return the step's result, with its tickets."""
        return replace(self.step.result(), done=self.done, failed_tickets=self.failed)
