"""Runs of a figure side by side, in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from quire.simulator.paper.runs import Curve, Outcome, Run, find_rate, perform

__all__ = ["RunPool"]

T = TypeVar("T")


class RunPool:
    """Simulates runs, `jobs` at a time. scale: of all traces' seconds, to try a figure quickly;
    saturated runs are not shortened."""

    def __init__(self, jobs: int, scale: float) -> None:
        self._scale = scale
        self._pool = ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else None

    def seconds(self, full: float) -> float:
        """Return the seconds of a trace that has so many at full scale."""
        return max(full * self._scale, 1.0)

    def outcomes(self, runs: Sequence[Run]) -> list[Outcome]:
        """Perform each."""
        return self._map(perform, runs)

    def curves(self, runs: Sequence[Run]) -> list[Curve]:
        """Find the sustained rate of each."""
        return self._map(find_rate, runs)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _map(self, function: Callable[[Run], T], runs: Sequence[Run]) -> list[T]:
        return list((self._pool.map if self._pool else map)(function, runs))
