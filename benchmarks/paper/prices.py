"""One run by the times of several devices: while all requests wait, no decision depends on time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quire.entrypoints.simulator.run import Served
from quire.entrypoints.simulator.step_cost import Counts, StepCost

__all__ = ["StepPrices"]


class StepPrices(StepCost):
    """The times of one device. Meanwhile it notes what the same steps take on others, so that one
    simulation serves them all: if all requests come at once and none is swapped out, each system
    composes equal steps whatever these take."""

    def __init__(self, cost: StepCost, others: Sequence[StepCost]) -> None:
        """cost: cost of the device whose clock runs."""
        super().__init__(
            cost.device, cost.spec, num_devices=cost.num_devices, block_size=cost.block_size
        )
        self._others = tuple(others)
        self._seconds: list[list[float]] = [[] for _ in range(1 + len(others))]  # by device, step
        self._num_rows: list[int] = []

    def seconds(self, num_computed: Counts, num_tokens: Counts, num_sampled: int) -> float:
        own = super().seconds(num_computed, num_tokens, num_sampled)
        others = [each.seconds(num_computed, num_tokens, num_sampled) for each in self._others]
        for noted, value in zip(self._seconds, (own, *others), strict=True):
            noted.append(value)
        self._num_rows.append(len(num_tokens))
        return own

    def duplicate_s(self, num_blocks: int) -> float:
        own = super().duplicate_s(num_blocks)
        if num_blocks:
            others = [each.duplicate_s(num_blocks) for each in self._others]
            for noted, value in zip(self._seconds, (own, *others), strict=True):
                noted[-1] += value
        return own

    def served_by_others(self, served: Served) -> list[Served]:
        """`served`, which came of all steps so far, as each of the others would have served it."""
        ends = _sums(self._seconds[0])
        first, finished = (
            np.searchsorted(ends, moments) for moments in (served.first_token_s, served.finished_s)
        )
        found: list[Served] = []
        for seconds in self._seconds[1:]:
            ends = _sums(seconds)
            row_seconds = _sums(np.multiply(seconds, self._num_rows))
            found.append(
                replace(
                    served,
                    first_token_s=ends[first],
                    finished_s=ends[finished],
                    mean_running=float(row_seconds[-1] / ends[-1]),
                    busy_s=float(ends[-1]),
                    trace_hash="",
                )
            )
        return found


def _sums(seconds: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums up to each step, added up in the order in which clocks do it."""
    return np.add.accumulate(np.asarray(seconds, np.float64))
