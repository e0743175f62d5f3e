"""Tokens that a check refuses: outputs equal those of a run that never had them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from quire.errors import EngineError
from quire.protocol import EngineRequest, EnterRow, FinishReason, SamplingParams, StepPlan
from quire.protocol.step import IntArray
from quire.runner.rows import RowTable
from quire.scheduler.constraints.tails import Verdict
from quire.scheduler.sequence import Sequence
from tests.profiles import seeds
from tests.scheduler.random_moves import random_move, random_setup, with_states
from tests.scheduler.simulation import VOCAB, Client, Setup, Simulation, expected_tokens

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
    """Replaces tokens by a rule, and has every token drawn again now and then.

    redraws: how often a token is refused without another in its place, for those in `again` of
    100; never twice at one place.
    """

    rule: Rule
    again: int = 0
    drawn: Counter[str] = field(default_factory=Counter)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def watches(self, request: EngineRequest) -> bool:
        return True

    def judge(self, sequence: Sequence, known: IntArray, drawn: IntArray) -> Verdict | None:
        assert drawn.dtype == known.dtype == np.int32
        so_far = tuple(known.tolist())
        for i, token in enumerate(drawn.tolist()):
            place = sequence.handle, len(so_far)
            if place not in self.seen and hash(place) % 100 < self.again:
                self.seen.add(place)
                self.drawn["again"] += 1
                return Verdict(i)
            instead = self.rule(so_far, token)
            if instead is not None:
                self.drawn["replaced"] += 1
                return Verdict(i, np.array(instead, np.int32))
            so_far = (*so_far, token)
        return None


class Edited(Simulation):
    """Expects what the rule makes of the tokens, one after the other and without a cache."""

    def __init__(self, setup: Setup, rule: Rule, again: int = 0) -> None:
        self.editor = Editor(rule, again)
        super().__init__(setup, self.editor)

    def add(self, prompt: Iterable[int], **more: Any) -> list[int]:
        """A request that resumes among tokens in place of another would not be given the others."""
        return super().add(prompt, **{**more, "resume_at": 0})

    def _check_prefill_limits(self) -> None:
        """Tokens in place of others are computed like a prompt's, but are never admitted."""
        if not self.editor.drawn["replaced"]:
            super()._check_prefill_limits()
        assert self.standing.max() <= self.setup.prefill_limits.long_prefill_token_threshold

    def _uncut(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        stop: frozenset[int],
        min_tokens: int,
        seed: int,
        sample: int,
    ) -> tuple[int, ...]:
        return self._run(prompt, max_tokens, stop, min_tokens, seed, sample, None)[0]

    def _expected(self, client: Client) -> tuple[tuple[int, ...], bool]:
        """Tokens that come together are given together, also where one of them is poison."""
        return self._run(
            client.prompt,
            client.max_tokens,
            client.stop,
            client.min_tokens,
            client.seed,
            client.sample_index,
            self.setup.poison,
        )

    def _run(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        stop: frozenset[int],
        min_tokens: int,
        seed: int,
        sample: int,
        poison: int | None,
    ) -> tuple[tuple[int, ...], bool]:
        """The tokens, and whether poison has ended them."""
        output: tuple[int, ...] = ()
        while True:
            known = (*prompt, *output)
            if poison in known:
                return output, True
            (drawn,) = expected_tokens(self.setup.model, known, 1, seed, sample)
            for token in self.editor.rule(known, drawn) or (drawn,):
                output = (*output, token)
                is_stop = token in stop and len(output) >= min_tokens
                if is_stop or len(output) >= max_tokens:
                    return output, False


def walk(seed: int, depth: int, *, has_states: bool) -> Edited:
    rng = random.Random(seed)
    setup = replace(random_setup(rng), depth=depth)
    if has_states:
        setup = with_states(rng, setup)
    rule = every(rng.choice((2, 5)), rng.choice((0, 1, 1, 2, 5)))
    found = Edited(setup, rule, rng.choice((0, 10, 50)))
    for _ in range(60):
        random_move(rng, found)
    found.drain()
    return found


@DEPTHS
@pytest.mark.parametrize("has_states", [False, True], ids=["paged", "recurrent"])
def test_random_traffic_with_refused_tokens_meets_everything(depth: int, has_states: bool) -> None:
    """Preemption by both ways, windows, forks, drafts, failing rows, and any number of tokens in
    place of others."""
    met: Counter[str] = Counter()
    for seed in seeds(30):
        try:
            found = walk(seed, depth, has_states=has_states)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        stats = found.scheduler.stats()
        met.update(found.done)
        met.update(found.editor.drawn)
        met.update(preempted=stats.preempted_total, swapped=stats.swapped_in_total)
    wanted = {"again", "replaced", "preempted", "forks"}
    wanted |= set() if has_states else {"rewinds", "swapped", "accepted"}
    for what in wanted:
        assert met[what] > 1, (what, met)
    assert not (has_states and met["rewinds"]), "a recurrent state was taken back"


def edited(rule: Rule, again: int = 0, **more: object) -> Edited:
    settings = {"max_num_batched_tokens": 32, "num_blocks": 80, "enable_prefix_caching": False}
    return Edited(Setup(**{**settings, **more}), rule, again)  # type: ignore[arg-type]


@DEPTHS
@pytest.mark.parametrize("windows", [(None,), (3,), (6, None, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("max_drafts", [0, 4])
def test_tokens_come_in_place_of_others(
    depth: int, windows: tuple[int | None, ...], count: int, max_drafts: int
) -> None:
    """Turns red when a window has released what the kept tokens read, when K/V of refused tokens
    are read, or when tokens of later steps are taken for those of the new tail."""
    found = edited(every(2, count), windows=windows, depth=depth, max_drafts=max_drafts)
    for seed in range(3):
        found.add((*PROMPT, seed), max_tokens=18, seed=seed, n=1 + seed % 2)
    found.drain()
    assert found.done["rewinds"] > 3
    assert found.scheduler.stats().preempted_total == 0


@DEPTHS
@pytest.mark.parametrize("prompt_len", range(1, 7))
@pytest.mark.parametrize("n", [1, 3])
def test_drawing_again_gives_what_was_never_refused(depth: int, prompt_len: int, n: int) -> None:
    """The first token too, where the samples still share the block of the prompt's last token."""
    found = edited(every(1, 0), again=100, depth=depth, block_size=3)
    found.add(range(prompt_len), max_tokens=9, n=n)
    found.drain()
    assert found.editor.drawn["again"] == 9 * n
    assert found.done["rewinds"] > 0


def test_refused_tokens_give_their_blocks_back() -> None:
    """Seven tokens of a step are refused, and with them the blocks of six."""
    found = edited(lambda known, drawn: (1,) if len(known) == 5 else None, depth=1, block_size=1)
    truth = expected_tokens(found.setup.model, PROMPT, 9, 0, 0)
    found.scheduler._drafts._proposer = _Drafts(truth[:6])
    found.add(PROMPT, max_tokens=12)
    assert found.plan()
    assert found.scheduler.stats().num_used_blocks == 5 + 6
    found.apply()
    assert found.scheduler.stats().num_used_blocks == 5
    found.drain()


class _Drafts:
    """These once, then none."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens

    def propose(
        self, sequence: Sequence, known: IntArray, num_in_flight: int, max_drafts: int
    ) -> IntArray:
        tokens, self._tokens = self._tokens, ()
        return np.array(tokens, np.int32)


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
def test_a_sequence_preempted_before_its_tokens_are_judged_goes_on(
    depth: int, swaps: bool, max_drafts: int
) -> None:
    for before in range(6):
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
        found.drain()


class _Bad:
    """Watches requests of seed 0 and gives one answer."""

    def __init__(self, answer: Verdict | Exception) -> None:
        self._answer = answer

    def watches(self, request: EngineRequest) -> bool:
        return request.seed == 0

    def judge(self, sequence: Sequence, known: IntArray, drawn: IntArray) -> Verdict:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@DEPTHS
@pytest.mark.parametrize(
    ("answer", "logprobs", "sentence"),
    [
        (ValueError("no such state"), None, "no such state"),
        (Verdict(2), None, "is no verdict"),
        (Verdict(-1), None, "is no verdict"),
        (Verdict(0, np.array([-3], np.int32)), None, "is no verdict"),
        (Verdict(0, np.array([3], np.int32)), 1, "ask without logprobs"),
    ],
)
def test_a_check_that_fails_costs_its_own_request(
    depth: int, answer: Verdict | Exception, logprobs: int | None, sentence: str
) -> None:
    found = Simulation(Setup(depth=depth, num_blocks=60), _Bad(answer))
    bad = found.add(PROMPT, n=2, logprobs=logprobs)
    (good,) = found.add(PROMPT, seed=1)
    found.lost |= set(bad)
    found.drain()
    for handle in bad:
        finish = found.clients[handle].finish
        assert finish is not None
        assert finish.reason is FinishReason.ERROR
        assert sentence in finish.message
    assert len(found.clients[good].tokens) == 4


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
