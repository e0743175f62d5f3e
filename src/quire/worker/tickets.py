"""A step that also started work under tickets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quire.protocol.step import StepPlan, StepResult, TicketFailure
from quire.runner.pending import PendingStep

__all__ = ["TicketedStep", "failures_of"]

MESSAGE = "K/V were lost on the way to host memory or back"


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


def failures_of(plan: StepPlan, not_arrived: frozenset[int]) -> tuple[TicketFailure, ...]:
    """The tickets of a plan some of whose blocks did not arrive."""
    if not not_arrived:
        return ()
    is_lost = np.isin(plan.swap_in_dst, list(not_arrived))
    lost = sorted(set(plan.swap_in_ticket[is_lost].tolist()))
    return tuple(
        TicketFailure(ticket, plan.swap_in_dst[is_lost & (plan.swap_in_ticket == ticket)], MESSAGE)
        for ticket in lost
    )
