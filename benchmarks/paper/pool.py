"""Runs of all figures side by side, in processes of their own, each run once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from threading import Lock

from benchmarks.paper.runs import (
    Curve,
    Outcome,
    Run,
    Scale,
    find_rate,
    perform,
    perform_scaled,
)

__all__ = ["RunPool"]


class RunPool:
    """Simulates runs, `jobs` at a time, for figures that ask from threads of their own. A run that
    several figures need is simulated once. scale: factor on all traces' seconds, to try a figure
    quickly; saturated runs are not shortened."""

    def __init__(self, jobs: int, scale: float) -> None:
        self._scale = scale
        self._pool = (
            ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else ThreadPoolExecutor(1)
        )
        self._begun: dict[Run, Future[Outcome]] = {}
        self._lock = Lock()

    def seconds(self, full: float) -> float:
        """Return the seconds of a trace that has so many at full scale."""
        return max(full * self._scale, 1.0)

    def outcomes(self, runs: Sequence[Run]) -> list[Outcome]:
        """Perform each."""
        return [future.result() for future in [self._begin(run) for run in runs]]

    def curves(self, runs: Sequence[Run]) -> list[Curve]:
        """Find the sustained rate of each."""
        full = self.outcomes([replace(run, rate=math.inf) for run in runs])
        found = [
            self._pool.submit(find_rate, run, outcome.requests_per_s)
            for run, outcome in zip(runs, full, strict=True)
        ]
        return [future.result() for future in found]

    def scaled(self, runs: Sequence[tuple[Run, tuple[Scale, ...]]]) -> list[list[Outcome]]:
        """Perform each saturated run with each of its changes of a constant."""
        begun = {each: self._pool.submit(perform_scaled, *each) for each in dict.fromkeys(runs)}
        return [begun[each].result() for each in runs]

    def close(self) -> None:
        """End the processes; runs that have not begun are cancelled."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, run: Run) -> Future[Outcome]:
        if math.isinf(run.rate):  # all requests come at once, however long the trace
            run = replace(run, seconds=0.0)
        with self._lock:
            if run not in self._begun:
                self._begun[run] = self._pool.submit(perform, run)
            return self._begun[run]
