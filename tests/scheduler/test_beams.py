"""Beam searches over the fake model: equal to a search without cache, whatever happens to them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from quire.base.errors import RequestError
from quire.protocol import BeamRules, EngineRequest, FinishReason, SamplingParams
from tests.pairs import LAWS_BY_PAIRS
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

pytestmark = LAWS_BY_PAIRS

ROOMY = Setup(num_blocks=120, max_num_seqs=8, max_num_batched_tokens=32)
PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None,), (3,), (None, 4)])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_equals_the_search_without_a_cache(depth, windows, width):
    """`drain` compares tokens, scores and endings with `beam_reference`."""
    for stopping, penalty in itertools.product((False, True, "never"), (0.0, 1.0, 2.0, -0.5)):
        setup = Setup(depth, windows, num_blocks=120, max_num_seqs=6, max_num_batched_tokens=16)
        simulation = Simulation(setup)
        rules = BeamRules(width, penalty, stopping)
        simulation.add(PROMPT, max_tokens=12, beams=rules, n=width, stop=frozenset({3, 7}))
        simulation.drain()


def test_beside_all_other_kinds_of_requests():
    simulation = Simulation(ROOMY)
    simulation.add([9, 9], max_tokens=20)
    simulation.add(PROMPT, max_tokens=10, beams=BeamRules(3), n=3)
    simulation.add(PROMPT, max_tokens=9, n=3, seed=5)
    simulation.add([7] * 9, max_tokens=10, beams=BeamRules(2), n=1, stop=frozenset({3}))
    simulation.drain()
    assert all(c.finish.reason is not FinishReason.ERROR for c in simulation.clients.values())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None,), (3,), (None, 4)])
def test_preempted_at_every_step_is_not_preempted(depth, windows):
    """Rows, candidates in flight and chosen tokens that no plan has carried yet are all lost."""
    for cut in range(18):
        setup = Setup(depth, windows, num_blocks=120, max_num_seqs=4, max_num_batched_tokens=3)
        simulation = Simulation(setup)
        handles = simulation.add(PROMPT, max_tokens=6, beams=BeamRules(3), n=3)
        for move in range(cut):
            if move % 2:
                simulation.apply()
            else:
                while simulation.plan():
                    pass
        group = simulation.scheduler.state.roster.groups.get(handles[0])
        if group is not None and group in simulation.scheduler.state.roster.running:
            simulation.scheduler._lifecycle.preempt(group)
            simulation.check()
        simulation.drain()


def test_a_pool_that_is_too_small_preempts_whole_searches():
    setup = Setup(num_blocks=24, max_num_seqs=12, block_size=2, max_num_batched_tokens=16)
    simulation = Simulation(setup)
    for i in range(4):
        simulation.add([i] * 4, max_tokens=12, beams=BeamRules(3), n=3)
    simulation.drain()
    assert simulation.scheduler.stats().preempted_total > 0


@pytest.mark.parametrize("when", range(12))
def test_aborted_at_any_time_leaves_nothing(when):
    simulation = Simulation(ROOMY)
    handles = simulation.add(PROMPT, max_tokens=8, beams=BeamRules(3), n=2)
    (other,) = simulation.add([4, 4], max_tokens=12)
    for _ in range(when):
        simulation.plan()
        if when % 2:
            simulation.apply()
    simulation.abort(handles[1])
    simulation.plan()
    simulation.abort(handles[0])
    simulation.drain()
    assert simulation.clients[other].finish.reason is FinishReason.LENGTH


def test_the_prompt_of_a_search_comes_from_the_cache():
    simulation = Simulation(ROOMY)
    simulation.add(PROMPT * 3, max_tokens=1)
    simulation.drain()
    simulation.add(PROMPT * 3, max_tokens=4, beams=BeamRules(4), n=4)
    simulation.drain()
    assert simulation.scheduler.stats().cached_tokens_total == 14


def test_blocks_of_beams_that_end_come_back_at_once():
    """Blocks in use never exceed what the live beams alone name; most steps share most of them."""
    simulation = Simulation(ROOMY)
    simulation.add(PROMPT * 4, max_tokens=10, beams=BeamRules(4), n=4)
    scheduler, size = simulation.scheduler, simulation.setup.block_size
    while scheduler.has_unfinished:
        simulation.plan()
        simulation.apply()
        live = np.flatnonzero(scheduler.state.table.live)
        prefixes = {
            tuple(scheduler.state.table.token_ids[slot, : min(end, computed)].tolist())
            for slot in live.tolist()
            for computed in [int(scheduler.state.table.num_computed[slot])]
            for end in range(size, computed + size, size)
        }
        assert simulation.kv.pool.num_used <= len(prefixes)


def test_a_step_copies_at_most_one_block_per_beam():
    simulation = Simulation(ROOMY)
    simulation.add(PROMPT, max_tokens=14, beams=BeamRules(5), n=5)
    num_copies = 0
    while simulation.scheduler.has_unfinished:
        plan = simulation.scheduler.plan(0.0)
        if plan is not None:
            assert len(plan.copy_dst) <= len(plan.append_slot)
            num_copies += len(plan.copy_dst)
            simulation.in_flight.append(simulation.executor.execute(plan))
        simulation.apply()
    assert num_copies > 0


def test_logprobs_of_each_token_of_each_sequence_found():
    simulation = Simulation(ROOMY)
    handles = simulation.add(PROMPT, max_tokens=7, beams=BeamRules(3), n=3, logprobs=0)
    simulation.drain()
    for handle in handles:
        whole = simulation.clients[handle].finish.whole
        assert [entry.token_id for entry in whole.logprobs] == whole.token_ids.tolist()
        assert sum(entry.logprob for entry in whole.logprobs) == whole.cum_logprob


def _request(**more):
    arguments = {"max_tokens": 4, **more}
    beams = arguments.pop("beams")
    output = np.array(arguments.pop("output", []), np.int32)
    params = SamplingParams(**arguments)
    prompt = np.array(PROMPT, np.int32)
    return EngineRequest("r", 0, prompt, params, 0, output_token_ids=output, beams=beams)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (_request(beams=BeamRules(9)), "beam width is 9, but the engine computes 8 sequences"),
        (_request(beams=BeamRules(8), max_tokens=27), "in each of its 8 beams.*hold 30 in each"),
        (_request(beams=BeamRules(2), output=[1]), "starts with its prompt"),
    ],
    ids=["width", "pool", "resumed"],
)
def test_refused_with_a_sentence(request_, words):
    simulation = Simulation(Setup(num_blocks=120, max_num_seqs=8, max_model_len=40))
    with pytest.raises(RequestError, match=words):
        simulation.scheduler.add(request_)


def test_without_max_tokens_it_takes_what_all_beams_can_have():
    simulation = Simulation(Setup(num_blocks=32, max_num_seqs=4, block_size=2, max_model_len=32))
    handles = simulation.add(PROMPT, max_tokens=None, beams=BeamRules(4), n=4)
    simulation.drain()
    assert simulation.clients[handles[0]].asked.max_tokens == 32 // 4 * 2 + 1 - len(PROMPT)
