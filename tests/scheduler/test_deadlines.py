"""Requests whose first token cannot come in time are dropped before they are computed."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.plan.scheduler.deadlines import PrefillSpeed
from quire.protocol import FinishReason, SchedulingParams
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

SETUP = Setup(
    depth=1, block_size=4, num_blocks=300, max_num_seqs=1, max_num_batched_tokens=10,
    max_model_len=300,
)  # fmt: skip


def within(seconds: float) -> SchedulingParams:
    return SchedulingParams(deadline_s=seconds)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 30 for i in range(length)]


def run_at(simulation: Simulation, seconds_per_step: float) -> None:
    """Run until everything has ended; `Simulation.plan` lets a tenth of a second pass by itself."""
    simulation.step_seconds = seconds_per_step
    while simulation.scheduler.has_unfinished:
        simulation.now += seconds_per_step - 0.1
        simulation.plan()
        simulation.apply()


class TestPrefillSpeed:
    def test_unknown_at_first(self):
        assert PrefillSpeed().tokens_per_s(5.0) == 0.0

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_steps_of_half_a_second(self, depth):
        speed = PrefillSpeed()
        for i in range(20):
            speed.step_planned(100.0 + i / 2, 64)
            if i >= depth - 1:
                speed.step_ended(0.5)
        assert speed.tokens_per_s(110.0) == pytest.approx(128)

    def test_steps_that_only_decode_do_not_count(self):
        speed = PrefillSpeed()
        for i, num_tokens in enumerate((50, 0, 50, 0)):
            speed.step_planned(float(i), num_tokens)
            speed.step_ended(0.5)
        assert speed.tokens_per_s(5.0) == pytest.approx(100)

    def test_follows_a_change_and_grows_old(self):
        speed = PrefillSpeed()
        for i, seconds in enumerate([0.1] * 30 + [1.0] * 60):
            speed.step_planned(float(i), 10)
            speed.step_ended(seconds)
        assert speed.tokens_per_s(90.0) == pytest.approx(10, rel=0.1)
        assert speed.tokens_per_s(200.0) == 0.0

    def test_lost_steps_are_forgotten(self):
        speed = PrefillSpeed()
        speed.step_planned(0.0, 10)
        speed.steps_lost()
        assert speed.tokens_per_s(5.0) == 0.0


def test_idle_time_is_no_prefill_time():
    """A prompt ends the busy time; a request that comes long after is not dropped for it."""
    simulation = Simulation(SETUP)
    simulation.add(prompt(20), max_tokens=1)
    run_at(simulation, 0.1)
    simulation.now += 1000.0
    (handle,) = simulation.add(prompt(20, 3), max_tokens=2, scheduling=within(5.0))
    run_at(simulation, 0.1)
    assert simulation.clients[handle].finish.reason is FinishReason.LENGTH


def test_a_wrong_estimate_heals():
    """After one very slow step an idle engine takes what comes, and learns."""
    simulation = Simulation(SETUP)
    simulation.add(prompt(5), max_tokens=1)
    run_at(simulation, 300.0)
    for i in range(4):
        ask = within(5.0)
        (handle,) = simulation.add(prompt(20, i), max_tokens=2, salt=str(i), scheduling=ask)
        run_at(simulation, 0.1)
        assert simulation.clients[handle].finish.reason is FinishReason.LENGTH


def test_those_that_have_ended_are_not_kept():
    simulation = Simulation(SETUP)
    for i in range(200):
        simulation.add(prompt(3, i % 20), max_tokens=1, scheduling=within(1e6))
        run_at(simulation, 0.1)
    assert len(simulation.scheduler.state.deadlines._latest_starts) <= 64


def test_one_that_waits_too_long_is_dropped():
    simulation = Simulation(SETUP)
    simulation.add(prompt(10), max_tokens=30)
    late = simulation.add(prompt(10, 3), scheduling=within(5.0))[0]
    on_time = simulation.add(prompt(10, 4), scheduling=within(500.0))[0]
    run_at(simulation, seconds_per_step=1.0)
    finish = simulation.clients[late].finish
    assert finish is not None
    assert finish.reason is FinishReason.DEADLINE
    assert "within 5 s" in finish.message
    assert "deadline_s" in finish.message
    assert not simulation.clients[late].tokens
    assert len(simulation.clients[on_time].tokens) == 4
    simulation.drain()


def test_it_is_told_as_soon_as_it_is_known():
    """At 10 tokens per second, 100 tokens take 10 seconds, which nobody has who asks for 8."""
    simulation = Simulation(SETUP)
    simulation.step_seconds = 1.0
    simulation.add(prompt(50), max_tokens=40)
    for _ in range(10):
        simulation.now += 0.9
        simulation.plan()
        simulation.apply()
    hopeless = simulation.add(prompt(100, 3), max_tokens=1, scheduling=within(8.0))[0]
    simulation.plan()
    simulation.apply()
    finish = simulation.clients[hopeless].finish
    assert finish is not None
    assert finish.reason is FinishReason.DEADLINE
    simulation.drain()


def test_what_is_cached_needs_no_time():
    simulation = Simulation(SETUP)
    simulation.add(prompt(100), max_tokens=1)
    run_at(simulation, seconds_per_step=1.0)
    again = simulation.add([*prompt(100), 1, 2], max_tokens=3, scheduling=within(8.0))[0]
    run_at(simulation, seconds_per_step=1.0)
    assert len(simulation.clients[again].tokens) == 3
    simulation.drain()


def test_one_that_has_begun_is_not_dropped():
    simulation = Simulation(SETUP)
    handle = simulation.add(prompt(100), max_tokens=2, scheduling=within(5.0))[0]
    run_at(simulation, seconds_per_step=1.0)
    assert len(simulation.clients[handle].tokens) == 2
    simulation.drain()


def test_all_samples_end():
    simulation = Simulation(SETUP)
    simulation.add(prompt(10), max_tokens=30)
    handles = simulation.add(prompt(10, 3), n=3, scheduling=within(2.0))
    run_at(simulation, seconds_per_step=1.0)
    reasons = {simulation.clients[handle].finish.reason for handle in handles}
    assert reasons == {FinishReason.DEADLINE}
    simulation.drain()


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "2", True])
def test_deadline_is_above_zero(value):
    with pytest.raises(RequestError, match="deadline_s is"):
        SchedulingParams(deadline_s=value)


def test_a_deadline_costs_no_tokens_of_others():
    """The fake model's tokens are checked by `drain`; here, that nothing was computed in vain."""
    simulation = Simulation(SETUP)
    simulation.add(prompt(10), max_tokens=3)
    for i in range(5):
        simulation.add(prompt(40, i), scheduling=within(0.5))
    computed = 0
    while simulation.scheduler.has_unfinished:
        simulation.now += 1.0
        simulation.plan()
        computed += int(np.sum(simulation.standing))
        simulation.apply()
    assert computed == 12
    simulation.drain()
