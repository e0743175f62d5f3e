"""Drafts on = drafts off, token for token, over the fake executor.

The walks of `test_machine.py` have drafts too; here each of what they may meet is sought out.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from quire.base.errors import EngineError
from quire.compute.runner.drafts import draw_in_turns
from quire.compute.runner.rows import RowTable
from quire.protocol import EnterRow, FinishReason, SamplingParams, StepPlan
from quire.protocol.step import StepResult, TokenLogprobs
from tests.pairs import LAWS_BY_PAIRS
from tests.profiles import seeds, under_seed
from tests.scheduler.expected import expected_tokens, make_model
from tests.scheduler.proposers import Knows, Wrong
from tests.scheduler.random_moves import random_setup, walk
from tests.scheduler.simulated_setup import Setup
from tests.scheduler.simulation import Simulation

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
PLAIN = make_model((None,), has_state=False)
PROMPT = (4, 9, 2, 7, 5)


def simulation(num_right: int, **more: object) -> Simulation:
    setup = Setup(**{"max_num_batched_tokens": 32, "num_blocks": 60, **more})  # type: ignore[arg-type]
    found = Simulation(setup)
    found.scheduler._drafts._proposer = Knows(setup.model, num_right)
    return found


@DEPTHS
def test_random_traffic_with_drafts_meets_everything(depth: int) -> None:
    """Preemption by both ways, prefix hits, forks, beams, stops, and any number of right drafts."""
    met: Counter[str] = Counter()
    for seed in seeds(40, first=200):
        rng = random.Random(seed)
        setup = replace(random_setup(rng), depth=depth, max_drafts=rng.choice((1, 3, 6)))
        found = Simulation(setup)
        with under_seed(seed):
            walk(rng, found, num_moves=60)
        stats = found.scheduler.stats()
        met.update(found.done)
        met.update(preempted=stats.preempted_total, swapped=stats.swapped_in_total)
        met.update(cached=stats.cached_tokens_total)
    for what in ("drafts", "accepted", "preempted", "swapped", "cached", "forks"):
        assert met[what] > 5, (what, met)
    assert met["accepted"] < met["drafts"]


@DEPTHS
@pytest.mark.parametrize("guesses", ["wrong", "right", "beyond", "methods", "model"])
def test_random_traffic_with_adversarial_drafts(depth: int, guesses: str) -> None:
    """Always wrong, always right, longer than asked and past the end; drafters with a policy, fed
    by predictions; and a draft model, whose drafts follow tokens that nobody here knows yet."""
    met: Counter[str] = Counter()
    for seed in seeds(36):
        rng = random.Random(seed)
        setup = replace(
            random_setup(rng), depth=depth, max_drafts=5, guesses=guesses, num_checkpoints=None,
            max_num_batched_tokens=16,
        )  # fmt: skip
        found = Simulation(setup)
        with under_seed(seed):
            walk(rng, found, num_moves=60)
        met.update(found.done)
    assert met["drafts"] > 5
    if guesses == "wrong":  # but by chance, beside where they were meant to stand
        assert met["accepted"] < met["drafts"] / 5
    else:
        assert met["accepted"] > 5


@DEPTHS
@pytest.mark.parametrize("num_right", [0, 1, 4])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(depth: int, num_right: int) -> None:
    steps: list[int] = []
    for right in (None, num_right):
        found = simulation(right or 0, depth=depth)
        if right is None:
            found.scheduler._drafts._proposer = None
        found.add(PROMPT, max_tokens=20)
        found.drain()
        steps.append(found.num_steps)
    assert steps[1] <= steps[0]
    if num_right == 4 and depth == 1:
        assert steps[1] == 4  # of 5 tokens each, the first with the prompt


@DEPTHS
@pytest.mark.parametrize("at", range(1, 9))
def test_a_stop_token_within_an_accepted_run_ends_it(depth: int, at: int) -> None:
    """Turns red when a token after the stop is given, or the step's other tokens are lost."""
    tokens = expected_tokens(PLAIN, PROMPT, 20, 0, 0)
    found = simulation(5, depth=depth)
    found.add(PROMPT, max_tokens=20, stop=frozenset({tokens[at], 1000, 1001, 1002, 1003}))
    found.drain()
    client = found.clients[0]
    assert tuple(client.tokens) == tokens[: tokens.index(tokens[at]) + 1]
    assert client.finish is not None
    assert client.finish.reason is FinishReason.STOP
    assert client.finish.stop_token_id == tokens[at]


@DEPTHS
def test_a_stop_token_before_min_tokens_does_not_end_a_run(depth: int) -> None:
    """The same token twice in one run: banned from ending the sequence at first, then not."""
    tokens = expected_tokens(PLAIN, PROMPT, 30, 0, 0)
    again = next(i for i in range(1, 30) if tokens[i] in tokens[:i])
    first = tokens.index(tokens[again])
    found = simulation(6, depth=depth)
    stop = frozenset({tokens[again]})
    found.add(PROMPT, max_tokens=None, stop=stop, min_tokens=first + 2)
    found.drain()
    assert tuple(found.clients[0].tokens) == tokens[: again + 1]


@DEPTHS
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_drafts_never_go_beyond_max_tokens(depth: int, max_tokens: int) -> None:
    found = simulation(6, depth=depth)
    found.add(PROMPT, max_tokens=max_tokens)
    found.drain()
    assert len(found.clients[0].tokens) == max_tokens


def test_rejected_drafts_give_their_blocks_back() -> None:
    found = simulation(0, depth=1, block_size=2)
    found.scheduler._drafts._proposer = Wrong(9)
    found.add(PROMPT, max_tokens=30)
    for _ in range(6):
        assert found.plan()
        drafted = found.scheduler.stats().num_used_blocks
        found.apply()
        used = found.scheduler.stats().num_used_blocks
        assert used == -(-int(found.scheduler.state.table.num_computed.max()) // 2)
        assert used < drafted
    found.drain()


@DEPTHS
def test_drafts_preempt_nobody(depth: int) -> None:
    """Turns red when guesses take the blocks that certain tokens need."""
    found = simulation(0, depth=depth, num_blocks=16, block_size=2, max_num_seqs=2)
    found.scheduler._drafts._proposer = Wrong(8)
    for seed in range(2):
        found.add((*PROMPT, seed), max_tokens=9, seed=seed)
    found.drain()
    assert found.scheduler.stats().preempted_total == 0
    assert found.done["drafts"] > 0


def test_each_token_of_a_run_has_its_logprobs_and_none_follows_the_end() -> None:
    tokens = expected_tokens(PLAIN, PROMPT, 20, 0, 0)
    found = simulation(5, depth=1)
    (handle,) = found.add(PROMPT, max_tokens=20, logprobs=0, stop=frozenset({tokens[3]}))
    given: list[int] = []
    while found.scheduler.has_unfinished:
        plan = found.scheduler.plan(found.now)
        assert plan is not None
        result = found.executor.execute(plan).result()
        entries = tuple(TokenLogprobs(token, -1.0, 1) for token in result.token_ids.tolist())
        output = found.scheduler.apply(replace(result, logprobs={0: entries}))
        assert [entry.token_id for entry in output.logprobs[handle]] == output.token_ids.tolist()
        given += output.token_ids.tolist()
    assert tuple(given) == tokens[:4]


@DEPTHS
@pytest.mark.parametrize("num_right", [0, 2, 4])
@pytest.mark.parametrize("swaps", [False, True], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("stop_at", [2, 3, 20])
def test_a_sequence_preempted_with_drafts_in_flight_goes_on(
    depth: int, num_right: int, swaps: bool, stop_at: int
) -> None:
    """Turns red when late tokens of a run are miscounted, or what only its rejected drafts computed
    is swapped out as the sequence's own."""
    tokens = expected_tokens(PLAIN, PROMPT, 21, 0, 0)
    for before in range(5):
        found = simulation(num_right, depth=depth, num_host_blocks=60 * swaps)
        found.add(PROMPT, max_tokens=20, stop=frozenset({tokens[stop_at]}))
        for _ in range(before):
            found.plan()
            found.apply()
        while found.plan():
            pass
        for group in list(found.scheduler.state.roster.running):
            found.scheduler._lifecycle.preempt(group)
        found.drain()


@pytest.mark.parametrize("depth", [2, 3])
def test_later_steps_learn_where_they_began(depth: int) -> None:
    """Turns red when the blocks of a row that fails later are counted from an upper bound."""
    found = simulation(1, depth=depth)
    found.add(PROMPT, max_tokens=20)
    table, seen = found.scheduler.state.table, 0
    while found.plan():
        pass
    while found.apply() and table.live[0]:
        for step in list(found.scheduler._results._in_flight)[:1]:
            assert step.starts[0] == table.num_known[0] - 1
            seen += 1
        found.plan()
    assert seen > 3


def test_a_row_that_fails_after_its_drafts_were_planned_fails_alone() -> None:
    """Turns red when the blocks of a failed row are counted from the upper bound of its start."""
    for seed in range(8):
        rng = random.Random(seed)
        setup = Setup(depth=3, poison=3, num_blocks=80, max_num_batched_tokens=16, max_drafts=4)
        walk = Simulation(setup)
        shared = [rng.choice((5, 6)) for _ in range(8)]
        for i in range(4):
            walk.add([*shared, i + 10], max_tokens=14, seed=i)
        walk.drain()


# --- rows -----------------------------------------------------------------------------------------


def rows_with(num_tokens: int, drafts: list[int]) -> tuple[RowTable, StepPlan]:
    rows = RowTable(2, 16, [4])
    enter = EnterRow(
        1, np.arange(num_tokens, dtype=np.int32), num_tokens, num_tokens - 1,
        (np.zeros(4, np.int32),), SamplingParams(), 0, 0,
    )  # fmt: skip
    plan = StepPlan(
        0,
        enter=(enter,),
        delta_slot=np.array([1], np.int32),
        delta_tokens=np.array([1], np.int32),
        draft_slot=np.full(len(drafts), 1, np.int32),
        draft_token=np.array(drafts, np.int32),
    )
    rows.apply(plan)
    return rows, plan


@pytest.mark.parametrize(
    ("drawn", "kept"),
    [([9, 0], [9]), ([20, 9, 0], [20, 9]), ([20, 21, 22, 23], [20, 21, 22, 23]), ([-1], [])],
)
def test_a_row_keeps_what_it_drew_and_forgets_other_drafts(drawn: list[int], kept: list[int]):
    rows, _ = rows_with(5, [20, 21, 22])
    scheduled = rows.scheduled()
    assert scheduled.num_tokens.tolist() == [4]
    assert rows.token_ids[1, 4:8].tolist() == [4, 20, 21, 22]
    rows.commit_computed(scheduled)
    slots = np.array([1])
    found = draw_in_turns(rows, slots, lambda _, turn: np.array([drawn[turn]], np.int32))
    assert found.token_ids.tolist() == kept
    assert found.counts.tolist() == ([len(kept)] if kept else [])
    if kept:
        assert rows.output_ids(1).tolist() == kept
        assert rows.num_computed[1] == rows.num_tokens[1] - 1
    rows.apply(StepPlan(1))
    assert rows.num_drafts.tolist() == [0, 0]


def test_drafts_of_a_row_that_does_not_reach_its_last_token_are_refused() -> None:
    rows, _ = rows_with(5, [])
    rows.num_computed[1] = 2
    draft = np.array([1], np.int32)
    rows.apply(StepPlan(1, draft_slot=draft, draft_token=draft))
    with pytest.raises(EngineError, match="does not reach"):
        rows.scheduled()


def test_a_plan_with_drafts_does_not_keep_its_rows() -> None:
    """Else a captured step would be repeated without them."""
    draft = np.array([1], np.int32)
    assert StepPlan(0).keeps_rows
    assert not StepPlan(0, draft_slot=draft, draft_token=draft).keeps_rows


def test_a_result_without_counts_has_one_token_per_row() -> None:
    found = simulation(0)
    found.scheduler._drafts._proposer = None
    found.add(PROMPT, max_tokens=1)
    plan = found.scheduler.plan(found.now)
    assert plan is not None
    whole = found.executor.execute(plan).result()
    output = found.scheduler.apply(StepResult(plan.step_id, whole.slots, whole.token_ids))
    assert output.token_ids.tolist() == whole.token_ids.tolist()
