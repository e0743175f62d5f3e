"""Costs of swapping and of computing, by a clock of the test's own."""

from __future__ import annotations

import pytest

from quire.compute.worker import recovery
from quire.compute.worker.recovery import measure_recovery
from quire.protocol import StepPlan, StepResult
from quire.protocol.step import EMPTY_INTS, IntArray
from tests.kv_cache.model import make_layout


class Busy:
    """A clock, and a machine on which another process runs during most copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.num_copies = 0
        monkeypatch.setattr(recovery.time, "perf_counter", lambda: self.now)

    def execute(self, plan: StepPlan) -> StepResult:
        self.now += 0.5
        return StepResult(plan.step_id, EMPTY_INTS, EMPTY_INTS)

    def copy_out(self, blocks: IntArray, places: IntArray) -> None:
        self.num_copies += 1
        self.now += 0.001 if self.num_copies % 4 == 0 else 5.0


def test_one_copy_in_four_that_was_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an engine that started on a busy machine took swapping for dear until its end."""
    busy = Busy(monkeypatch)
    costs = measure_recovery(
        busy.execute,
        busy.copy_out,
        layout=make_layout(((None, 4),), 4),
        num_blocks=64,
        num_host_blocks=10,
        longest_step=50,
    )
    assert costs.seconds_per_block == pytest.approx(0.001 / 10)
    assert costs.seconds_per_token == pytest.approx(0.5 / 50)
