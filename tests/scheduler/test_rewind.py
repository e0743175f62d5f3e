"""Tokens that a check refuses: outputs equal those of a run that never had them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from quire.base.errors import EngineError
from quire.compute.runner.rows import RowTable
from quire.plan.scheduler.constraints.unsent import Question, Verdict
from quire.plan.scheduler.sequence import MAX_UNJUDGED
from quire.protocol import (
    BeamRules,
    EngineRequest,
    EnterRow,
    FinishReason,
    SamplingParams,
    StepPlan,
)
from quire.protocol.step import IntArray
from tests.pairs import LAWS_BY_PAIRS
from tests.profiles import seeds, under_seed
from tests.scheduler.expected import VOCAB, Asked, expected_tokens
from tests.scheduler.proposers import Once
from tests.scheduler.random_moves import random_move, random_setup, with_states
from tests.scheduler.simulated_setup import Client, Setup
from tests.scheduler.simulation import Simulation

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
PROMPT = (4, 9, 2, 7, 5)

Rule = Callable[[tuple[int, ...], int], tuple[int, ...] | None]
"""Tokens so far and the one drawn next → what comes in its place, None for itself."""


def every(stride: int, count: int) -> Rule:
    """About one token in `stride` becomes `count` others."""

    def rule(known: tuple[int, ...], drawn: int) -> tuple[int, ...] | None:
        word = random.Random(hash((*known[-6:], len(known), drawn))).randrange(stride)
        if word or not count:
            return None
        return tuple((drawn + 7 * i + len(known)) % VOCAB for i in range(1, count + 1))

    return rule


@dataclass
class Editor:
    """Replaces tokens by a rule, and holds others back, for those in `holds` of 100."""

    rule: Rule
    holds: int = 0
    done: Counter[str] = field(default_factory=Counter)
    sent: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def watches(self, request: EngineRequest) -> bool:
        return request.beams is None

    def answer(self, question: Question) -> Verdict:
        handle, tokens = question.handle, question.token_ids.tolist()
        assert question.token_ids.dtype == np.int32
        assert tokens or question.is_last
        sent = self.sent.get(handle, ())
        before = (*question.request.prompt_token_ids.tolist(), *sent)
        num_passed = 0
        for i in range(question.num_known, len(tokens)):
            so_far = (*before, *tokens[:i])
            instead = self.rule(so_far, tokens[i])
            if instead is not None:
                self.done["replaced"] += 1
                return self._verdict(question, num_passed, i, instead)
            if hash((*so_far, tokens[i])) % 100 >= self.holds:
                num_passed = i + 1
        if question.is_last:
            num_passed = len(tokens)
        self.done["held"] += num_passed < len(tokens)
        return self._verdict(question, num_passed)

    def _verdict(
        self,
        question: Question,
        num_passed: int,
        num_kept: int | None = None,
        instead: tuple[int, ...] = (),
    ) -> Verdict:
        sent = self.sent.get(question.handle, ())
        passed = tuple(question.token_ids[:num_passed].tolist())
        self.sent[question.handle] = (*sent, *passed)
        return Verdict(question.handle, num_passed, num_kept, np.array(instead, np.int32))


class Edited(Simulation):
    """Expects what the rule makes of the tokens, one after the other and without a cache."""

    patience = 20  # a replaced token may have all of a sequence computed again

    def __init__(self, setup: Setup, rule: Rule, holds: int = 0) -> None:
        self.editor = Editor(rule, holds)
        super().__init__(setup, self.editor)

    def add(self, prompt: Iterable[int], **more: Any) -> list[int]:
        """A request that resumes among tokens in place of another would not be given the others."""
        return super().add(prompt, **{**more, "resume_at": 0})

    def _check_prefill_limits(self) -> None:
        """Tokens in place of others are computed like a prompt's, but are never admitted."""
        if not self.editor.done["replaced"]:
            super()._check_prefill_limits()
        assert self.standing.max() <= self.setup.prefill_limits.long_prefill_token_threshold

    def _uncut(self, asked: Asked) -> tuple[int, ...]:
        return self._run(asked, None)[0]

    def _expected(self, client: Client) -> tuple[tuple[int, ...], bool]:
        """Tokens that come together are given together, also where one of them is poison."""
        return self._run(client.asked, self.setup.poison)

    def _check_client(self, handle: int, client: Client) -> None:
        """A token that no verdict lets pass may fail its row before the verdict comes."""
        finish = client.finish
        is_failed = finish is not None and finish.reason is FinishReason.ERROR
        if is_failed and client.beams is None and self.setup.poison in range(VOCAB):
            whole = self._expected(client)[0]
            assert whole[: len(client.tokens)] == tuple(client.tokens)
            return
        super()._check_client(handle, client)

    def _run(self, asked: Asked, poison: int | None) -> tuple[tuple[int, ...], bool]:
        """The tokens, and whether poison has ended them."""
        output: tuple[int, ...] = ()
        while True:
            known = (*asked.prompt, *output)
            if poison in known:
                return output, True
            (drawn,) = expected_tokens(
                self.setup.model, known, 1, asked.seed, asked.sample_index, asked.adapter
            )
            for token in self.editor.rule(known, drawn) or (drawn,):
                output = (*output, token)
                is_stop = asked.may_stop_at(token, len(output)) or asked.repeats_at(output)
                if is_stop or len(output) >= asked.max_tokens:
                    return output, False


def walk(seed: int, depth: int, *, has_states: bool) -> Edited:
    rng = random.Random(seed)
    setup = replace(random_setup(rng), depth=depth)
    if has_states:
        setup = with_states(rng, setup)
    rule = every(rng.choice((2, 5)), rng.choice((0, 1, 1, 2, 5)))
    found = Edited(setup, rule, rng.choice((0, 10, 50, 90)))
    for _ in range(90):
        if rng.random() < 0.3:
            found.answer()
        else:
            random_move(rng, found)
    found.drain()
    return found


@DEPTHS
@pytest.mark.parametrize("has_states", [False, True], ids=["paged", "recurrent"])
def test_random_traffic_with_refused_tokens_meets_everything(depth: int, has_states: bool) -> None:
    """Preemption by both ways, windows, forks, drafts, failing rows, verdicts that come late, and
    any number of tokens in place of others."""
    met: Counter[str] = Counter()
    for seed in seeds(40):
        with under_seed(seed):
            found = walk(seed, depth, has_states=has_states)
        stats = found.scheduler.stats()
        met.update(found.done)
        met.update(found.editor.done)
        met.update(preempted=stats.preempted_total, swapped=stats.swapped_in_total)
    wanted = {"held", "replaced", "preempted", "forks"}
    wanted |= set() if has_states else {"rewinds", "swapped", "accepted"}
    for what in wanted:
        assert met[what] > 0, (what, met)
    assert not (has_states and met["rewinds"]), "a recurrent state was taken back"


def edited(rule: Rule, holds: int = 0, **more: object) -> Edited:
    settings = {"max_num_batched_tokens": 32, "num_blocks": 80, "enable_prefix_caching": False}
    return Edited(Setup(**{**settings, **more}), rule, holds)  # type: ignore[arg-type]


@DEPTHS
@pytest.mark.parametrize("windows", [(None,), (3,), (6, None, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("max_drafts", [0, 4])
def test_tokens_come_in_place_of_others(
    depth: int, windows: tuple[int | None, ...], count: int, max_drafts: int
) -> None:
    """Turns red when a window has released what the kept tokens read, when K/V of refused tokens
    are read, or when tokens of later steps are taken for those of the new tail."""
    found = edited(every(2, count), 50, windows=windows, depth=depth, max_drafts=max_drafts)
    for seed in range(3):
        found.add((*PROMPT, seed), max_tokens=18, seed=seed, n=1 + seed % 2)
    found.drain()
    num_preempted = found.scheduler.stats().preempted_total
    if windows == (None,):
        assert found.done["rewinds"] > 3
        assert num_preempted == 0
    else:
        assert num_preempted > 3  # what a window has left cannot be read again


@DEPTHS
@pytest.mark.parametrize("prompt_len", range(1, 7))
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("caches", [False, True])
def test_the_first_token_may_be_replaced(depth: int, prompt_len: int, n: int, caches: bool) -> None:
    """The samples may still share the block of the prompt's last token, and others may have found
    by name what goes."""

    def rule(known: tuple[int, ...], drawn: int) -> tuple[int, ...] | None:
        return ((drawn + 3) % VOCAB,) if len(known) == prompt_len else None

    found = edited(rule, depth=depth, block_size=3, enable_prefix_caching=caches)
    found.add(range(prompt_len), max_tokens=9, n=n)
    found.drain()
    assert found.editor.done["replaced"] == n


@DEPTHS
@pytest.mark.parametrize("lateness", [0, 3, 30])
@pytest.mark.parametrize("windows", [(None,), (3,)], ids=str)
def test_a_sequence_waits_for_late_verdicts_and_others_go_on(
    depth: int, lateness: int, windows: tuple[int | None, ...]
) -> None:
    rule = every(3, 2)
    found = edited(
        lambda known, drawn: rule(known, drawn) if known[0] == PROMPT[0] else None,
        depth=depth,
        windows=windows,
        block_size=3,
    )
    found.add(PROMPT, max_tokens=18)
    found.scheduler._requests._watches = lambda request: False
    plain = found.add((1, *PROMPT), max_tokens=12)
    for _ in range(lateness):
        found.plan()
        found.apply()
    if lateness == 30:
        assert found.clients[plain[0]].finish is not None
        watched = found.scheduler.state.table
        most = MAX_UNJUDGED + depth  # those in flight when the bound was met come too
        assert (watched.num_total[watched.live] <= len(PROMPT) + most).all()
    found.drain()


def test_refused_tokens_give_their_blocks_back() -> None:
    """Seven tokens of a step are refused, and with them the blocks of six."""
    found = edited(lambda known, drawn: (1,) if len(known) == 5 else None, depth=1, block_size=1)
    truth = expected_tokens(found.setup.model, PROMPT, 9, 0, 0)
    found.scheduler._drafts._proposer = Once(truth[:6])
    found.add(PROMPT, max_tokens=12)
    assert found.plan()
    assert found.scheduler.stats().num_used_blocks == 5 + 6
    found.apply()
    assert found.answer()
    assert found.scheduler.stats().num_used_blocks == 5
    found.drain()


@DEPTHS
def test_a_row_that_fails_for_a_refused_token_goes_on(depth: int) -> None:
    """The next step computes the token before anybody refuses it."""
    tokens = expected_tokens(Setup().model, PROMPT, 8, 0, 0)

    def rule(known: tuple[int, ...], drawn: int) -> tuple[int, ...] | None:
        return ((drawn + 1) % VOCAB,) if drawn == tokens[3] else None

    found = edited(rule, depth=depth, poison=tokens[3])
    found.add(PROMPT, max_tokens=12)
    found.drain()
    finish = found.clients[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.LENGTH


@DEPTHS
@pytest.mark.parametrize("swaps", [False, True], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("is_judged_first", [False, True])
def test_a_sequence_preempted_before_its_tokens_are_judged_goes_on(
    depth: int, swaps: bool, max_drafts: int, is_judged_first: bool
) -> None:
    for before in range(20):
        found = edited(
            every(2, 2), 30, depth=depth, num_host_blocks=80 * swaps, max_drafts=max_drafts
        )
        found.add(PROMPT, max_tokens=18)
        for _ in range(before):
            found.plan()
            found.apply()
        while found.plan():
            pass
        for group in list(found.scheduler.state.roster.running):
            found.scheduler._lifecycle.preempt(group)
        if is_judged_first:
            while found.answer():
                pass
        found.drain()


class _Answers:
    """Watches requests of seed 0 and gives one kind of verdict."""

    def __init__(self, answer: Callable[[Question], Verdict]) -> None:
        self.answer = answer

    def watches(self, request: EngineRequest) -> bool:
        return request.seed == 0


@DEPTHS
def test_a_verdict_that_fails_costs_its_own_request(depth: int) -> None:
    judge = _Answers(lambda question: Verdict(question.handle, failure="the hook crashed"))
    found = Simulation(Setup(depth=depth, num_blocks=60), judge)
    bad = found.add(PROMPT, n=2)
    (good,) = found.add(PROMPT, seed=1)
    found.lost |= set(bad)
    found.drain()
    for handle in bad:
        finish = found.clients[handle].finish
        assert finish is not None
        assert finish.reason is FinishReason.ERROR
        assert "the hook crashed" in finish.message
        assert not found.clients[handle].tokens
    assert len(found.clients[good].tokens) == 4


@DEPTHS
def test_replaced_tokens_have_no_log_probabilities(depth: int) -> None:
    judge = _Answers(lambda q: Verdict(q.handle, 0, 0, np.array([3], np.int32)))
    found = Simulation(Setup(depth=depth), judge)
    (handle,) = found.add(PROMPT, logprobs=1)
    found.lost.add(handle)
    found.drain()
    finish = found.clients[handle].finish
    assert finish is not None
    assert "ask without logprobs" in finish.message


@DEPTHS
@pytest.mark.parametrize("num_kept", [0, 1])
def test_a_verdict_ends_one_sample_after_the_tokens_that_stay(depth: int, num_kept: int) -> None:
    def answer(question: Question) -> Verdict:
        if question.sample_index == 1:
            return Verdict(question.handle, num_kept, num_kept, end="not allowed")
        return Verdict(question.handle, len(question.token_ids))

    found = Simulation(Setup(depth=depth), _Answers(answer))
    handles = found.add(PROMPT, n=3, max_tokens=6)
    while found.scheduler.has_unfinished or found.in_flight:
        while found.plan():
            pass
        found.apply()
        while found.answer():
            pass
    finish = found.clients[handles[1]].finish
    assert finish is not None
    assert finish.reason is FinishReason.CONTENT_FILTER
    assert finish.message == "not allowed"
    assert [len(found.clients[handle].tokens) for handle in handles] == [6, num_kept, 6]
    assert found.scheduler.forgotten() == [handles[1], handles[0], handles[2]]


def test_beams_are_not_watched() -> None:
    judge = _Answers(lambda question: Verdict(question.handle))
    found = Simulation(Setup(), judge)
    assert not found.add(PROMPT, beams=BeamRules(2))
    assert found.num_refused == 1


# --- rows -----------------------------------------------------------------------------------------


def row_of(num_tokens: int, num_computed: int) -> RowTable:
    rows = RowTable(2, 16, [4])
    enter = EnterRow(
        1, np.arange(num_tokens, dtype=np.int32), num_tokens, num_computed,
        (np.zeros(4, np.int32),), SamplingParams(), 0, 0,
    )  # fmt: skip
    rows.apply(StepPlan(0, enter=(enter,)))
    return rows


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("num_computed", [3, 7])
def test_a_row_forgets_its_tail_before_others_branch_off(num_computed: int) -> None:
    rows = row_of(8, num_computed)
    plan = StepPlan(
        1, rewind_slot=ints(1), rewind_tokens=ints(3), start_fork_src=ints(1),
        start_fork_dst=ints(0), append_slot=ints(1, 1, 0), append_token=ints(20, 21, 22),
    )  # fmt: skip
    assert not plan.keeps_rows
    rows.apply(plan)
    assert rows.token_ids[1, :7].tolist() == [0, 1, 2, 3, 4, 20, 21]
    assert rows.token_ids[0, :6].tolist() == [0, 1, 2, 3, 4, 22]
    assert rows.num_tokens.tolist() == [6, 7]
    assert rows.num_computed.tolist() == [min(num_computed, 5)] * 2


def test_a_row_cannot_forget_more_than_it_has() -> None:
    with pytest.raises(EngineError, match="takes 5 tokens from slot 1, which has 4"):
        row_of(4, 0).apply(StepPlan(1, rewind_slot=ints(1), rewind_tokens=ints(5)))
