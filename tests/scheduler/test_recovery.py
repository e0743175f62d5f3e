"""Ways back for a preempted group: measured costs decide, each way where it is cheaper."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quire.compute.worker import recovery
from quire.compute.worker.recovery import measure_recovery
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.step import IntArray, StepPlan, StepResult
from tests.kv_cache.model import make_layout
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

# Seven known tokens, of which the last one is computed again in any case: six, in blocks of two.
PROMPT = [1, 2, 3, 4, 5, 6]
NUM_TOKENS, NUM_BLOCKS = 6, 3
EVEN = NUM_TOKENS / (2 * NUM_BLOCKS)
"""Seconds per block, out or in, at which both ways take as long if a token takes one second."""


def preempted(
    seconds_per_block: float, *, n: int = 1, windows: tuple[int | None, ...] = (None,)
) -> Simulation:
    """An engine whose only request, of one prompt and a token of output, was just preempted."""
    simulation = Simulation(
        Setup(
            depth=1,
            num_blocks=60,
            num_host_blocks=60,
            enable_prefix_caching=False,  # which would have the blocks either way
            windows=windows,
            recovery_costs=RecoveryCosts(1.0, seconds_per_block),
        )
    )
    (handle, *_) = simulation.add(PROMPT, max_tokens=8, n=n)
    simulation.plan()
    simulation.apply()
    group = simulation.scheduler.state.roster.groups[handle]
    assert [s.num_pending for s in group.sequences] == [0] * n
    simulation.scheduler._lifecycle.preempt(group)
    return simulation


def ways(simulation: Simulation) -> set[bool]:
    """Return for waiting sequences whether the host has them, as a set."""
    groups = simulation.scheduler.state.roster.groups.values()
    return {sequence.swapped is not None for group in groups for sequence in group.sequences}


@pytest.mark.parametrize(
    ("seconds_per_block", "is_swapped"),
    [
        (EVEN / 2, True),
        (math.nextafter(EVEN, 0), True),
        (EVEN, False),
        (math.nextafter(EVEN, 2), False),
        (EVEN * 2, False),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_the_cheaper_way_back_is_taken(n: int, seconds_per_block: float, is_swapped: bool) -> None:
    """Up to the boundary itself, where nothing is gained by copying; samples cost alike in both."""
    simulation = preempted(seconds_per_block, n=n)
    assert ways(simulation) == {is_swapped}
    assert simulation.scheduler.stats().swapped_out_total == is_swapped
    simulation.drain()
    assert bool(simulation.done["blocks_swapped_in"]) == is_swapped


@pytest.mark.parametrize(("share", "is_swapped"), [(0.99, True), (1.0, False)])
def test_every_layer_group_has_blocks_to_copy(share: float, is_swapped: bool) -> None:
    """Two groups, twice the bytes for the same tokens."""
    simulation = preempted(share * EVEN / 2, windows=(None, None))
    assert ways(simulation) == {is_swapped}
    simulation.drain()


def test_a_longer_sequence_takes_the_same_way() -> None:
    """Both costs grow alike, but a block that is hardly filled is copied whole."""
    costs = RecoveryCosts(seconds_per_token=1.0, seconds_per_block=4.0)  # even at 8 tokens a block
    for num_blocks in (1, 10, 1000):
        assert costs.prefers_swap(8 * num_blocks + 1, num_blocks)
        assert not costs.prefers_swap(8 * num_blocks, num_blocks)
    assert not costs.prefers_swap(1, 1)


def test_costs_are_measured_per_token_and_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: a token takes 0.25 s and a block 0.5 s, and what is done for the first
    time 100 s more, for memory that was never touched."""
    clock = Clock()
    monkeypatch.setattr(recovery.time, "perf_counter", clock.now)
    costs = measure_recovery(
        clock.execute,
        clock.copy_out,
        layout=make_layout(((None, 1), (8, 1)), 4),
        num_blocks=50,
        num_host_blocks=30,
        longest_step=64,
    )
    assert (costs.seconds_per_token, costs.seconds_per_block) == (0.25, 0.5)
    assert clock.copied == 30  # as many as there are on either side
    assert clock.prompt == 64


class Clock:
    """A device whose work moves a clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.copied = 0
        self.prompt = 0
        self._touched: set[str] = set()

    def now(self) -> float:
        return self.seconds

    def execute(self, plan: StepPlan) -> StepResult:
        self.prompt = max(self.prompt, int(plan.delta_tokens.sum()))
        self._work("execute", 0.25 * int(plan.delta_tokens.sum()))
        return StepResult(plan.step_id, np.zeros(0, np.int32), np.zeros(0, np.int32))

    def copy_out(self, src: IntArray, dst: IntArray) -> None:
        self.copied = len(dst)
        self._work("copy", 0.5 * len(src))

    def _work(self, kind: str, seconds: float) -> None:
        self.seconds += seconds + (0.0 if kind in self._touched else 100.0)
        self._touched.add(kind)
