"""Work under tickets: a group that waits for it is blocked, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from quire.plan.scheduler.sequence import GroupState, SequenceGroup
from quire.protocol import FinishReason, SchedulingParams
from tests.pairs import LAWS_BY_PAIRS
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
STEPS = pytest.mark.parametrize("steps", [0, 1, 3, 6])
PROMPT = list(range(1, 10))


def coming_in(
    depth: int,
    steps: int,
    *,
    losses: float = 0.0,
    num_blocks: int = 60,
    n: int = 1,
) -> tuple[Simulation, list[int], SequenceGroup]:
    """An engine with a request whose K/V were swapped out and are being copied back, for so many
    steps after the present one. Its handles and its group."""
    simulation = Simulation(
        Setup(
            depth=depth,
            num_blocks=num_blocks,
            num_host_blocks=60,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            enable_prefix_caching=False,  # so that its blocks are found nowhere else
            ticket_steps=(steps,),
            losses=losses,
        )
    )
    handles = simulation.add(PROMPT, max_tokens=12, n=n)
    while len(simulation.clients[handles[0]].tokens) < 2:
        simulation.plan()
        simulation.apply()
    while simulation.in_flight:
        simulation.apply()
    group = simulation.scheduler.state.roster.groups[handles[0]]
    simulation.scheduler._lifecycle.preempt(group)
    assert simulation.plan()
    assert group.state is GroupState.BLOCKED
    assert group.is_coming_in
    return simulation, handles, group


def step(simulation: Simulation) -> None:
    while simulation.plan():
        pass
    simulation.apply()


@DEPTHS
@STEPS
def test_a_long_ticket_leaves_all_else_running(depth: int, steps: int) -> None:
    """Others are admitted and get a token from every step while the copies take their time."""
    simulation, _, group = coming_in(depth, steps)
    (other,) = simulation.add([3, 4, 5], max_tokens=20)
    table = simulation.scheduler.state.table
    while group.state is GroupState.BLOCKED:
        before = {slot: int(table.num_computed[slot]) for slot in np.flatnonzero(table.live)}
        planned = simulation.num_steps
        step(simulation)
        made = simulation.num_steps - planned
        for slot, computed in before.items():
            assert table.num_computed[slot] >= computed + made
        assert simulation.num_steps <= steps + 2 * depth + 20, "the ticket never ended"
    assert len(simulation.clients[other].tokens) >= steps - 1
    simulation.drain()
    assert simulation.scheduler.stats().preempted_total == 1


@DEPTHS
@STEPS
def test_alone_it_waits_for_no_more_steps_than_its_ticket(depth: int, steps: int) -> None:
    """Steps that compute nothing are planned one at a time, and only to hear of the ticket."""
    simulation, _, group = coming_in(depth, steps)
    first = simulation.num_steps
    while group.state is GroupState.BLOCKED:
        assert len(simulation.in_flight) <= 1
        step(simulation)
    assert simulation.num_steps - first == steps
    simulation.drain()


@DEPTHS
@pytest.mark.parametrize("losses", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 3])
def test_what_a_failed_ticket_lost_is_computed_again(depth: int, losses: float, n: int) -> None:
    """Nobody fails, and nobody else is disturbed; `drain` checks the tokens."""
    simulation, handles, group = coming_in(depth, 2, losses=losses, n=n)
    (other,) = simulation.add([3, 4, 5], max_tokens=9)
    while group.is_coming_in:
        step(simulation)
    simulation.drain()
    finishes = [simulation.clients[handle].finish for handle in (*handles, other)]
    assert [finish.reason for finish in finishes if finish] == [FinishReason.LENGTH] * (n + 1)
    assert simulation.scheduler.stats().preempted_total <= 2


@DEPTHS
def test_a_failed_ticket_sets_the_computed_count_back(depth: int) -> None:
    """To the first token whose block did not arrive, and no further."""
    simulation, (handle,), group = coming_in(depth, 1)
    blocks = simulation.scheduler.state.kv.tables(group.sequences[0].slot)[0]
    simulation.executor.tiers.lose = lambda given: given[given == blocks[2]]
    slot = group.sequences[0].slot
    while group.state is GroupState.BLOCKED:
        simulation.apply()
        if group.state is GroupState.BLOCKED:
            simulation.plan()
    assert simulation.scheduler.state.table.num_computed[slot] == 2 * simulation.setup.block_size
    assert simulation.clients[handle].finish is None
    simulation.drain()
    assert simulation.scheduler.stats().preempted_total == 1


@DEPTHS
@STEPS
@pytest.mark.parametrize("n", [1, 2])
def test_abort_while_blocked(depth: int, steps: int, n: int) -> None:
    """The blocks stay with the ticket until it has ended: nobody gets one that is still written."""
    simulation, handles, _ = coming_in(depth, steps, num_blocks=16, n=n)
    simulation.abort(handles[0])
    others = [simulation.add([7, i, 5, 6], max_tokens=8)[0] for i in range(3)]
    simulation.drain()
    assert simulation.clients[handles[0]].finish.reason is FinishReason.ABORT  # type: ignore[union-attr]
    assert all(simulation.clients[h].finish.reason is FinishReason.LENGTH for h in others)  # type: ignore[union-attr]


@DEPTHS
@STEPS
def test_preemption_while_blocked(depth: int, steps: int) -> None:
    """It goes back to the queue, its K/V still in the host, and comes in again."""
    simulation, _, group = coming_in(depth, steps)
    simulation.scheduler._lifecycle.preempt(group)
    simulation.check()
    assert group.state is GroupState.WAITING
    assert all(sequence.swapped is not None for sequence in group.sequences)
    simulation.drain()
    stats = simulation.scheduler.stats()
    assert (stats.swapped_out_total, stats.swapped_in_total) == (1, 2)


@DEPTHS
@STEPS
def test_an_older_request_takes_the_blocks_of_one_that_comes_in(depth: int, steps: int) -> None:
    """It waits for the end of the copies and preempts no third one meanwhile."""
    setup = Setup(
        depth=depth, num_blocks=12, num_host_blocks=60, max_num_batched_tokens=32, max_num_seqs=3,
        enable_prefix_caching=False, ticket_steps=(steps,), max_model_len=32,
    )  # fmt: skip
    simulation = Simulation(setup)
    handles = [simulation.add([i, 2, 3, 4, 5], max_tokens=15)[0] for i in range(3)]
    simulation.drain()
    assert simulation.scheduler.stats().swapped_in_total > 0
    assert all(len(simulation.clients[handle].tokens) == 15 for handle in handles)


@DEPTHS
@STEPS
def test_lost_steps_while_blocked(depth: int, steps: int) -> None:
    """Nothing of it was in the steps that were lost: it is computed again."""
    simulation, (handle,), _ = coming_in(depth, steps)
    simulation.lose_steps()
    assert simulation.clients[handle].finish is None
    simulation.drain()
    assert simulation.clients[handle].finish.reason is FinishReason.LENGTH  # type: ignore[union-attr]


@DEPTHS
def test_a_deadline_of_a_blocked_request(depth: int) -> None:
    """An open prompt of one token is blocked from the start, and dropped when it comes too late."""
    simulation = Simulation(Setup(depth=depth))
    scheduling = SchedulingParams(deadline_s=0.35)
    (late,) = simulation.add(PROMPT, given=1, scheduling=scheduling)
    (other,) = simulation.add([1, 2, 3], max_tokens=8)
    group = simulation.scheduler.state.roster.groups[late]
    assert group.state is GroupState.BLOCKED
    while group.state is not GroupState.FINISHED:
        step(simulation)
        assert simulation.num_steps < 20
    assert simulation.clients[late].finish.reason is FinishReason.DEADLINE  # type: ignore[union-attr]
    del simulation.arriving[late]
    simulation.drain()
    assert simulation.clients[other].finish.reason is FinishReason.LENGTH  # type: ignore[union-attr]


@DEPTHS
def test_an_open_prompt_is_blocked_with_its_blocks_and_yields_them(depth: int) -> None:
    """While nobody needs them it goes on at once when more of the prompt comes."""
    simulation = Simulation(Setup(depth=depth, num_blocks=8, max_num_batched_tokens=32))
    (handle,) = simulation.add(PROMPT, max_tokens=2, given=7)
    group = simulation.scheduler.state.roster.groups[handle]
    step(simulation)
    assert group.state is GroupState.BLOCKED
    assert group.has_slots
    simulation.extend(handle, 1)
    assert group.state is GroupState.RUNNING
    step(simulation)
    assert group.state is GroupState.BLOCKED
    simulation.add([5] * 9, max_tokens=3)
    step(simulation)
    assert not group.has_slots
    assert group.state is GroupState.BLOCKED
    simulation.drain()


@DEPTHS
@pytest.mark.parametrize("given", [1, 4])
def test_a_prompt_that_goes_on_still_waits_for_its_adapter(depth: int, given: int) -> None:
    """Fault: more of the prompt ends the wait for the adapter too, and the base model answers."""
    simulation = Simulation(Setup(depth=depth))
    (handle,) = simulation.add(PROMPT, given=given, adapter="one", is_adapter_late=True)
    group = simulation.scheduler.state.roster.groups[handle]
    simulation.extend(handle, 3)
    assert group.state is GroupState.BLOCKED
    assert not simulation.plan()
    simulation.open_adapters()
    step(simulation)
    simulation.drain()
    assert len(simulation.clients[handle].tokens) == 4


@DEPTHS
def test_an_adapter_that_is_there_still_waits_for_the_prompt(depth: int) -> None:
    simulation = Simulation(Setup(depth=depth))
    (handle,) = simulation.add(PROMPT, given=1, adapter="one")
    assert simulation.scheduler.state.roster.groups[handle].state is GroupState.BLOCKED
    assert not simulation.plan()
    simulation.drain()
