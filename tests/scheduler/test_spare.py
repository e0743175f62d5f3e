"""Requests on spare capacity: they come behind all others, and are computed all the same."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.settings import SCHEDULING_POLICIES
from quire.plan.scheduler.policies.spare import SPARE_ACCOUNT
from quire.plan.scheduler.sequence import GroupState
from quire.plan.scheduler.token_budget import MAX_STEPS_PAUSED
from quire.protocol import SchedulingParams
from tests.profiles import examples
from tests.scheduler.random_moves import random_prompt, random_setup
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

SPARE = SchedulingParams(is_spare=True)


class Watched:
    """A simulation that looks at each plan for who was admitted."""

    def __init__(self, setup: Setup) -> None:
        self.simulation = Simulation(setup)
        self.num_spare_admitted = 0
        self.num_paused = 0

    def groups(self) -> set:
        return set(self.simulation.scheduler.state.roster.groups.values())

    def spare_decodes(self) -> dict[tuple[int, int], int]:
        """Tokens that spare sequences with one to compute have computed, by slot and generation."""
        table = self.simulation.scheduler.state.table
        decodes = table.live & (table.todo() == 1)
        if decodes.sum() > self.simulation.setup.max_num_batched_tokens:
            return {}
        spare = np.flatnonzero(decodes & (table.account == SPARE_ACCOUNT)).tolist()
        return {
            (slot, int(table.generation[slot])): int(table.num_computed[slot]) for slot in spare
        }

    def check_pause(self, before: dict[tuple[int, int], int]) -> None:
        """Spare sequences sit a step out for a prompt of another kind, for no other reason, and not
        for ever. before: `spare_decodes` before the step."""
        simulation, state = self.simulation, self.simulation.scheduler.state
        table = state.table
        computes, is_spare = simulation.standing > 0, table.account == SPARE_ACCOUNT
        starts = simulation.scheduler._results._in_flight[-1].starts
        has_prompt = (computes & ~is_spare & (starts < table.num_prompt)).any()
        has_spare = (computes & is_spare).any()
        is_paused = simulation.scheduler._budget.is_spare_paused
        if is_paused:
            assert has_prompt, "spare requests sit out for nobody"
            assert not has_spare and self.num_paused < MAX_STEPS_PAUSED
        elif has_prompt and has_spare:
            assert self.num_paused == MAX_STEPS_PAUSED, "one is computed beside a prompt"
        if not is_paused and not state.kv.transfers.num_orphaned:
            for (slot, generation), num_computed in before.items():
                if table.generation[slot] == generation:
                    assert table.num_computed[slot] > num_computed, "one sits out for nobody"
        self.num_paused = self.num_paused + 1 if is_paused else 0

    def plan(self) -> None:
        """No spare group goes from waiting to running while another kind waits."""
        state = self.simulation.scheduler.state
        waited = {group for group in self.groups() if group.state is GroupState.WAITING}
        before = self.spare_decodes()
        if self.simulation.plan():
            self.check_pause(before)
        admitted = {group for group in waited if group.state is GroupState.RUNNING}
        spare = [group for group in admitted if group.is_spare]
        self.num_spare_admitted += len(spare)
        if spare:
            assert not state.waiting.num_urgent, "a spare request overtook one that waits"
        urgent = [group for group in state.roster.running if not group.is_spare]
        order = [group.is_spare for group in state.roster.running]
        assert order == sorted(order), f"{len(urgent)} urgent groups stand behind spare ones"


@examples(60)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(SCHEDULING_POLICIES))
def test_spare_requests_are_admitted_only_while_nothing_else_waits(seed: int, policy: str) -> None:
    """And each gets its own tokens in the end (`Simulation.drain`)."""
    rng = random.Random(seed)
    watched = Watched(random_setup(rng, policy))
    simulation = watched.simulation
    for _ in range(80):
        move = rng.random()
        if move < 0.3:
            is_spare = rng.random() < 0.6
            simulation.add(
                random_prompt(rng, simulation.setup),
                max_tokens=rng.choice((1, 3, 8)),
                n=rng.choice((1, 1, 2)),
                scheduling=replace(SPARE, is_spare=is_spare, tenant=rng.choice(("", "a"))),
            )
        elif move < 0.35 and simulation.clients:
            simulation.abort(rng.choice(list(simulation.clients)))
        elif move < 0.7:
            watched.plan()
        else:
            simulation.apply()
    simulation.drain()


def test_spare_steps_follow_each_other_one_by_one() -> None:
    """Fault: a request that comes beside a batch waits for two of its steps."""
    simulation = Simulation(Setup(max_num_seqs=8, num_blocks=96, block_size=4))
    scheduler = simulation.scheduler
    simulation.add([4, 5, 6], max_tokens=40, scheduling=SPARE)
    assert not scheduler.awaits_results  # nothing is in flight
    simulation.plan()
    assert scheduler.awaits_results
    simulation.add([7, 8, 9], max_tokens=40)
    assert not scheduler.awaits_results  # that one is planned at once
    simulation.plan()
    assert not scheduler.awaits_results


def test_a_prompt_gets_the_tokens_of_those_that_it_pauses() -> None:
    """Fault: a batch fills the steps, and a prompt beside it computes one token in each."""
    setup = Setup(max_num_seqs=8, num_blocks=96, block_size=4, max_num_batched_tokens=8)
    simulation = Simulation(setup)
    for seed in range(7):
        simulation.add([4 + seed], max_tokens=40, seed=seed, scheduling=SPARE)
    simulation.plan()
    simulation.apply()
    (handle,) = simulation.add(range(5, 29), max_tokens=2)
    table = simulation.scheduler.state.table
    for num_computed in (8, 16, 24):
        simulation.plan()
        (slot,) = np.flatnonzero(table.handle == handle)
        assert table.num_computed[slot] == num_computed
        simulation.apply()
    simulation.drain()


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_a_spare_request_gives_its_slot_away(policy: str) -> None:
    """Fault: a request that comes while a batch has all slots waits for the end of one of its
    requests."""
    setup = Setup(max_num_seqs=2, num_blocks=64, policy=policy, max_num_batched_tokens=32)
    simulation = Simulation(setup)
    for seed in range(2):
        simulation.add(range(4, 10), max_tokens=20, seed=seed, scheduling=SPARE)
    simulation.plan()
    simulation.apply()
    (handle,) = simulation.add(range(5, 9), max_tokens=2)
    simulation.plan()
    table = simulation.scheduler.state.table
    computing = {int(table.handle[slot]) for slot in np.flatnonzero(simulation.standing)}
    assert computing == {handle}, "a spare request is computed beside it, or it waits for one"
    simulation.drain()


def test_prompts_do_not_starve_a_spare_request() -> None:
    """Fault: while there are new prompts in each step, it is never computed."""
    simulation = Simulation(Setup(max_num_seqs=4, num_blocks=64, max_num_batched_tokens=16))
    (spare,) = simulation.add(range(4, 10), max_tokens=4, scheduling=SPARE)
    simulation.plan()
    num_tokens: list[int] = []
    for step in range(4 * (MAX_STEPS_PAUSED + 2)):
        simulation.apply()
        simulation.add((4 + step % 7, 6, 7), max_tokens=1)
        simulation.plan()
        num_tokens.append(len(simulation.clients[spare].tokens))
    assert num_tokens[MAX_STEPS_PAUSED - 1] == 1, "it did not give way"
    assert num_tokens[-1] == 4, "it starves"
    simulation.drain()


def run_held(simulation: Simulation) -> None:
    """Hold admission until whoever was admitted has ended, as a pause with mode "wait" does."""
    scheduler = simulation.scheduler
    scheduler.hold_admission(is_held=True)
    groups = scheduler.state.roster.groups
    new = {handle for handle, group in groups.items() if not group.was_admitted}
    for _ in range(2000):
        if not scheduler.has_admitted:
            break
        simulation.plan()
        simulation.apply()
    assert not scheduler.has_admitted, "an admitted request never ends"
    assert new <= set(groups), "a request was admitted during a pause"
    scheduler.hold_admission(is_held=False)


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_spare_requests_end_during_a_pause(policy: str, num_steps: int) -> None:
    """Fault: a spare request gave way, before the pause or in it, and stays behind the request it
    gave way to. The pause keeps that one out, so nothing can be planned. num_steps: steps before
    the pause."""
    setup = Setup(max_num_seqs=2, num_blocks=64, policy=policy, max_num_batched_tokens=32)
    simulation = Simulation(setup)
    for seed in range(2):
        simulation.add(range(4, 10), max_tokens=20, seed=seed, scheduling=SPARE)
    simulation.plan()
    simulation.apply()
    for seed in range(3):
        simulation.add(range(5, 9), max_tokens=8, seed=seed)
    for _ in range(num_steps):
        simulation.plan()
        simulation.apply()
    run_held(simulation)
    simulation.drain()


def test_no_spare_request_gives_way_during_a_pause() -> None:
    """Fault: it is computed again for a request that may not come in."""
    simulation = Simulation(Setup(max_num_seqs=2, num_blocks=64, max_num_batched_tokens=32))
    for seed in range(2):
        simulation.add(range(4, 10), max_tokens=20, seed=seed, scheduling=SPARE)
    simulation.plan()
    simulation.apply()
    simulation.add(range(5, 9), max_tokens=2)
    run_held(simulation)
    assert simulation.scheduler.stats().preempted_total == 0
    simulation.drain()


@examples(60)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(SCHEDULING_POLICIES))
def test_pauses_end_whoever_waits(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    simulation = Simulation(random_setup(rng, policy))
    for _ in range(80):
        move = rng.random()
        if move < 0.3:
            is_spare = rng.random() < 0.6
            simulation.add(
                random_prompt(rng, simulation.setup),
                max_tokens=rng.choice((1, 3, 8)),
                n=rng.choice((1, 1, 2)),
                scheduling=replace(SPARE, is_spare=is_spare),
            )
        elif move < 0.35:
            run_held(simulation)
        elif move < 0.7:
            simulation.plan()
        else:
            simulation.apply()
    simulation.drain()
