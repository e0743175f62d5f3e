"""Single faults that the random tests found once, each in its smallest form."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.errors import EngineError, RequestError
from quire.protocol import EMPTY_INTS, FinishReason, StepResult
from tests.pairs import BY_PAIRS
from tests.scheduler.simulated_setup import POISON_OUTSIDE, Setup
from tests.scheduler.simulation import Simulation

POISONED = [4, 5, 6, 7, POISON_OUTSIDE]
HEALTHY = [4, 5, 6, 7, 8]
"""Shares two blocks of two tokens with it."""

EITHER_WAY = pytest.mark.parametrize("readers_fail", [False, True])


def _failing(depth: int, readers_fail: bool, **changes: object) -> Simulation:
    setup = Setup(
        depth=depth,
        block_size=2,
        num_blocks=40,
        max_num_batched_tokens=16,
        poison=POISON_OUTSIDE,
        readers_fail=readers_fail,
        **changes,  # pyright: ignore[reportArgumentType]
    )
    return Simulation(setup)


def test_more_decodes_than_the_token_budget():
    """Would catch a step of more tokens than the buffers hold; the first ones to come go first."""
    simulation = Simulation(Setup(max_num_seqs=4, max_num_batched_tokens=2, num_blocks=60))
    simulation.add([1], max_tokens=6, n=4)
    simulation.drain()
    assert simulation.num_steps >= 1 + 4 * 5 // 2


@EITHER_WAY
@pytest.mark.parametrize("depth", [2, 3])
def test_a_row_that_fails_after_its_abort_leaves_no_garbage(depth, readers_fail):
    """Its blocks were published when the step was planned, and nobody owns them any more."""
    simulation = _failing(depth, readers_fail)
    (bad,) = simulation.add(POISONED)
    simulation.plan()
    simulation.abort(bad)
    (running,) = simulation.add(HEALTHY)
    simulation.plan()
    simulation.apply()
    (later,) = simulation.add(HEALTHY)
    simulation.drain()
    for handle in (running, later):
        assert simulation.clients[handle].finish.reason is FinishReason.LENGTH


@EITHER_WAY
def test_a_window_that_has_slid_past_a_failed_rows_block_has_read_it(readers_fail):
    """The reader's tables do not name the bad block any more when the failure arrives."""
    simulation = _failing(3, readers_fail, windows=(3,), max_model_len=24)
    simulation.add(POISONED, max_tokens=1)
    (reader,) = simulation.add(HEALTHY, max_tokens=12)
    simulation.drain()
    assert simulation.clients[reader].finish.reason is FinishReason.LENGTH


@EITHER_WAY
def test_a_reader_that_was_preempted_gets_no_token_made_of_garbage(readers_fail):
    """Tokens in flight of a preempted sequence count, unless they come from a failed row's K/V."""
    simulation = _failing(3, readers_fail)
    simulation.add(POISONED)
    (reader,) = simulation.add(HEALTHY, max_tokens=8)
    simulation.plan()
    simulation.scheduler._lifecycle.preempt(simulation.scheduler.state.roster.groups[reader])
    simulation.drain()
    assert simulation.clients[reader].finish.reason is FinishReason.LENGTH


@EITHER_WAY
def test_a_row_that_fails_after_its_preemption_fails_its_request(readers_fail):
    """In the middle of its prompt no token of it is in flight, but its garbage is."""
    simulation = _failing(2, readers_fail)
    (bad,) = simulation.add([*POISONED, *range(20)], max_tokens=2)
    simulation.plan()
    simulation.scheduler._lifecycle.preempt(simulation.scheduler.state.roster.groups[bad])
    simulation.apply()
    assert simulation.clients[bad].finish.reason is FinishReason.ERROR
    (reader,) = simulation.add(HEALTHY)
    simulation.drain()
    assert simulation.clients[reader].finish.reason is FinishReason.LENGTH


def test_rows_that_read_a_failed_rows_nan_do_not_fail_for_it():
    """The reader fails in the same result, with a smaller slot; it is computed again instead."""
    simulation = _failing(1, readers_fail=True)
    (first,) = simulation.add([1], max_tokens=1)
    simulation.add([2] * 8, max_tokens=2)
    simulation.drain()
    (bad,) = simulation.add(POISONED)
    (reader,) = simulation.add(HEALTHY)
    simulation.drain()
    assert simulation.clients[first].finish.reason is FinishReason.LENGTH
    assert simulation.clients[bad].finish.reason is FinishReason.ERROR
    assert simulation.clients[reader].finish.reason is FinishReason.LENGTH


def test_a_lost_plan_takes_its_leaving_rows_along():
    """The data side would go on computing the row of a sequence that was preempted."""
    simulation = Simulation(Setup(num_blocks=60))
    (first,) = simulation.add([1, 2, 3], max_tokens=6)
    (second,) = simulation.add([4, 5, 6], max_tokens=8)
    simulation.plan()
    simulation.apply()
    simulation.plan()
    simulation.scheduler._lifecycle.preempt(simulation.scheduler.state.roster.groups[second])
    simulation.plan()  # not admitted again while a token of it is in flight
    simulation.lose_steps()
    simulation.drain()
    assert simulation.clients[first].finish.reason is FinishReason.ERROR
    assert simulation.clients[second].finish.reason is FinishReason.LENGTH


def test_a_request_that_comes_with_its_stop_token_is_refused():
    """Else it would go on past its end."""
    simulation = Simulation(Setup())
    (handle,) = simulation.add([1, 2, 3], max_tokens=8)
    simulation.drain()
    tokens = simulation.clients[handle].tokens
    stop = frozenset({tokens[2]})
    with pytest.raises(RequestError, match=rf"has ended \(stop\) with token {tokens[2]}"):
        simulation.resume([1, 2, 3], tokens[:3], max_tokens=8, stop=stop)


def test_the_oldest_of_two_that_do_not_fit_together_is_never_preempted():
    """Each may take the whole pool; one after the other they both end."""
    simulation = Simulation(
        Setup(depth=3, block_size=2, num_blocks=10, max_model_len=20, max_num_batched_tokens=32)
    )
    simulation.add([1] * 3, max_tokens=17)
    simulation.add([2] * 3, max_tokens=17)
    simulation.drain()
    assert simulation.scheduler.stats().preempted_total > 0


def test_samples_of_a_group_are_refused_a_pool_that_none_of_them_fits():
    simulation = Simulation(Setup(block_size=2, num_blocks=4, max_model_len=20))
    assert simulation.add([1] * 3, max_tokens=17, n=2) == []
    assert simulation.num_refused == 1


def test_prompt_logprobs_read_no_cache():
    """Their values come from computing every prompt token."""
    simulation = Simulation(Setup())
    simulation.add([1, 2, 3, 4, 5])
    simulation.drain()
    simulation.add([1, 2, 3, 4, 5], prompt_logprobs=0)
    simulation.drain()
    assert simulation.scheduler.stats().cached_tokens_total == 0
    simulation.add([1, 2, 3, 4, 5])
    simulation.drain()
    assert simulation.scheduler.stats().cached_tokens_total == 4


def test_a_full_pool_does_not_reorder_what_is_cached_for_one_who_cannot_enter():
    """A waiting head is looked at in every step, which must cost and change nothing."""
    simulation = Simulation(Setup(block_size=2, num_blocks=8, max_model_len=16, depth=1))
    simulation.add([9, 9, 9, 9, 9], max_tokens=1)
    simulation.drain()
    simulation.add([1] * 9, max_tokens=7)
    simulation.plan()
    simulation.add([9, 9, 9, 9, 8, 8, 8, 8, 8], max_tokens=4)
    cached = list(simulation.kv.pool._cached)
    generation = simulation.scheduler.state.table.generation.copy()
    simulation.apply()
    simulation.plan()
    assert [block for block in cached if block in simulation.kv.pool._cached] == list(
        simulation.kv.pool._cached
    )
    assert (simulation.scheduler.state.table.generation == generation).all()
    simulation.drain()


def test_results_come_in_order():
    simulation = Simulation(Setup())
    simulation.add([1, 2])
    simulation.plan()
    with pytest.raises(EngineError, match="result of step 7 arrived, 0 was due"):
        simulation.scheduler.apply(StepResult(7, EMPTY_INTS, EMPTY_INTS))


@BY_PAIRS
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None,), (3,), (None, 4)])
@pytest.mark.parametrize("num_host_blocks", [0, 60])
def test_preempted_at_every_token_is_not_preempted(depth, windows, num_host_blocks):
    """One preemption after each number of planned steps, the prompt's chunks included."""
    for cut in range(14):
        setup = Setup(
            depth=depth,
            windows=windows,
            num_blocks=60,
            num_host_blocks=num_host_blocks,
            max_num_batched_tokens=3,
        )
        simulation = Simulation(setup)
        handles = simulation.add([1, 2, 3, 4, 5, 6, 7], max_tokens=6, n=1 + cut % 2)
        for _ in range(cut):
            while simulation.plan():
                pass
            simulation.apply()
        group = simulation.scheduler.state.roster.groups.get(handles[0])
        if group is not None and group in simulation.scheduler.state.roster.running:
            simulation.scheduler._lifecycle.preempt(group)
            assert (group.sequences[0].swapped is not None) == (num_host_blocks > 0)
            simulation.check()
        simulation.drain()


def test_any_arrival_order_gives_the_same_tokens():
    """`drain` compares each client with the model alone; here the orders are compared too."""
    requests = [([1, 2, 3, i % 3], 3 + i) for i in range(6)]
    outputs: list[list[list[int]]] = []
    for order in (range(6), range(5, -1, -1), (3, 0, 5, 1, 4, 2)):
        simulation = Simulation(Setup(num_blocks=14, max_num_seqs=3))
        by_request: dict[int, int] = {}
        for i in order:
            prompt, max_tokens = requests[i]
            (by_request[i],) = simulation.add(prompt, max_tokens=max_tokens, seed=i)
            simulation.plan()
        simulation.drain()
        outputs.append([simulation.clients[by_request[i]].tokens for i in range(6)])
    assert outputs[0] == outputs[1] == outputs[2]


def test_an_unchanged_step_is_an_empty_difference():
    """The message of a steady decode step stays under 64 bytes for any number of sequences."""
    simulation = Simulation(Setup(block_size=16, num_blocks=20, depth=1, max_num_seqs=4))
    for i in range(4):
        simulation.add([i, i], max_tokens=12)
    for _ in range(3):
        simulation.plan()
        simulation.apply()
    plan = simulation.scheduler.plan(0.0)
    assert plan is not None
    arrays = (plan.leave, plan.copy_src, plan.table_slot, plan.delta_slot)
    assert not any(len(array) for array in arrays)
    assert not plan.enter
    assert not plan.forks
    assert np.flatnonzero(simulation.scheduler.state.table.standing).tolist() == [0, 1, 2, 3]
