"""The door between plan and data: plans in, futures of results out."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from quire.protocol.step import StepPlan, StepResult

__all__ = ["Executor"]


class Executor(Protocol):
    """Executes plans in the order in which they are given."""

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step and return at once. The future raises on a fault of the device or the
        engine; then no step given so far counts, and the next plan takes all rows out. A fault of
        one row is in the result."""
        ...

    def shutdown(self) -> None:
        """Finish what was started, then free all resources. May be called twice."""
        ...
