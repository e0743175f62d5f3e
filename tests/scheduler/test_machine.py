"""Any sequence of requests, aborts, plans and late results gives every client its own tokens.

`Simulation` lists what is checked: tokens equal those of a model without a cache, every sequence
ends once and for the right reason, budgets hold, decodes are not starved, the oldest group is
never preempted, progress is bounded, and nothing is left behind.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.profiles import machine_settings, seeds
from tests.scheduler.random_moves import (
    random_add,
    random_extend,
    random_open,
    random_pin,
    random_setup,
    run_random,
)
from tests.scheduler.simulation import Simulation

SEEDS = st.integers(0, 2**32)


class SchedulerMachine(RuleBasedStateMachine):
    POLICY: str | None = None  # any

    @initialize(seed=SEEDS)
    def build(self, seed):
        self.simulation = Simulation(random_setup(random.Random(seed), self.POLICY))

    @rule(seed=SEEDS)
    def add(self, seed):
        random_add(random.Random(seed), self.simulation)

    @rule(seed=SEEDS)
    def open(self, seed):
        random_open(random.Random(seed), self.simulation)

    @precondition(lambda self: self.simulation.arriving)
    @rule(seed=SEEDS)
    def extend(self, seed):
        random_extend(random.Random(seed), self.simulation)

    @rule(seed=SEEDS)
    def pin(self, seed):
        random_pin(random.Random(seed), self.simulation)

    @precondition(lambda self: self.simulation.clients)
    @rule(data=st.data())
    def unpin(self, data):
        self.simulation.unpin(data.draw(st.sampled_from(sorted(self.simulation.clients))))

    @precondition(lambda self: self.simulation.clients)
    @rule(data=st.data())
    def abort(self, data):
        self.simulation.abort(data.draw(st.sampled_from(sorted(self.simulation.clients))))

    @precondition(lambda self: self.simulation.clients)
    @rule(data=st.data())
    def abort_request(self, data):
        clients = self.simulation.clients
        first = clients[data.draw(st.sampled_from(sorted(clients)))].first_handle
        for handle in [h for h, client in clients.items() if client.first_handle == first]:
            self.simulation.abort(handle)

    @rule(times=st.integers(1, 3))
    def plan(self, times):
        for _ in range(times):
            self.simulation.plan()

    @rule(times=st.integers(1, 4))
    def apply(self, times):
        for _ in range(times):
            self.simulation.apply()

    @rule()
    def lose_steps(self):
        self.simulation.lose_steps()

    def teardown(self):
        if hasattr(self, "simulation"):
            self.simulation.drain()


def test_every_client_gets_its_own_tokens():
    run_state_machine_as_test(SchedulerMachine, settings=machine_settings(examples=60, steps=40))


@pytest.mark.parametrize("block", range(4))
def test_random_traffic(block):
    """Longer runs than a shrinking search affords; a failure names its seed."""
    for seed in seeds(30, first=block * 100_000):
        try:
            run_random(seed, num_moves=100)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("seed", [1280])  # the budget's only token went to one who was preempted
def test_walks_of_the_soak_that_once_failed(seed):
    run_random(seed, num_moves=400)
