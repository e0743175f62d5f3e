"""Masks that follow their plan, over the fake model: a stale mask becomes a wrong token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quire.base.errors import EngineError, RequestError
from quire.protocol import FinishReason, IntArray
from quire.protocol.beam_search import BeamRules
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.step import LateInput, StepResult
from tests.engine.fake_engine import FakeEngine
from tests.engine.hash_grammar import SPEC, HashGrammars, mask_after
from tests.pairs import LAWS_BY_PAIRS
from tests.scheduler.beam_reference import search
from tests.speculation.test_laws import eager_policy

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
V = 1000


def make(grammars: HashGrammars | None = None, **settings: Any) -> FakeEngine:
    settings = {"depth": 2, "num_blocks": 200, "vocab_size": V, **settings}
    return FakeEngine(grammars=grammars or HashGrammars(V), **settings)


def expected(
    engine: FakeEngine, prompt: Sequence[int], count: int = 8, seed: int = 0, sample: int = 0
) -> list[int]:
    return engine.model.expected_tokens(
        prompt, count, seed, sample, lambda output: mask_after(output, V)
    )


class Sent:
    """Late input on its way to the executor."""

    def __init__(self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inputs: list[LateInput] = []
        late = engine.executor.late

        def watch(late_input: LateInput) -> None:
            self.inputs.append(late_input)
            late(late_input)

        monkeypatch.setattr(engine.executor, "late", watch)


@DEPTHS
@pytest.mark.parametrize("windows", [(None,), (6,), (None, 5)])
@pytest.mark.parametrize("budget", [9, 32])
def test_masked_rows_draw_what_is_allowed_and_plain_ones_are_as_ever(depth, windows, budget):
    """In one batch, chunked or not, with as many steps in flight as without masks."""
    engine = make(depth=depth, windows=windows, max_num_batched_tokens=budget)
    prompts = [[i, i + 1, *range(i * 3)] for i in range(1, 9)]
    handles = [
        engine.add(prompt, seed=i, grammar=SPEC if i % 2 else None)[0]
        for i, prompt in enumerate(prompts)
    ]
    most = 0
    while engine.core.has_unfinished:
        engine.step()
        most = max(most, len(engine.core._in_flight))
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        plain = engine.model.expected_tokens(prompt, 8, i)
        assert engine.tokens[handle] == (expected(engine, prompt, 8, i) if i % 2 else plain)
    assert most == depth - 1  # beside the step whose result was taken


@DEPTHS
@pytest.mark.parametrize("prompt_len", [1, 8, 11])
def test_samples_have_masks_of_their_own_from_the_first_token_on(depth, prompt_len, monkeypatch):
    engine = make(depth=depth)
    sent = Sent(engine, monkeypatch)
    prompt = list(range(prompt_len))
    handles = engine.add(prompt, n=6, seed=5, grammar=SPEC)
    engine.run()
    for sample, handle in enumerate(handles):
        assert engine.tokens[handle] == expected(engine, prompt, 8, 5, sample)
    first = sent.inputs[0]
    assert first.counts.tolist() == [1] * 6
    assert len(first.masks) == 1, "equal masks were sent more than once"
    assert max(len(late.masks) for late in sent.inputs) == 6


@DEPTHS
@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_preempted_is_not(depth, windows):
    engine = make(depth=depth, windows=windows, num_blocks=16 * len(windows) * 2)
    prompts = [[i] * 10 for i in range(8)]
    handles = [
        engine.add(prompt, max_tokens=40, seed=i, grammar=SPEC)[0]
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    assert engine.core.stats().preempted_total > 0
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        assert engine.tokens[handle] == expected(engine, prompt, 40, i)


@DEPTHS
def test_resumed_is_uninterrupted_and_a_prefix_hit_is_cold(depth):
    prompt = list(range(30))
    whole = expected(make(), prompt, 12, 3)
    engine = make(depth=depth)
    for cut in range(12):
        (handle,) = engine.add(prompt, max_tokens=12, seed=3, output=whole[:cut], grammar=SPEC)
        engine.run()
        assert engine.tokens[handle] == whole
    assert max(engine.num_cached.values()) >= 28


class Drafts:
    """Right drafts, up to `num_right`, then one that no mask allows, then whatever."""

    def __init__(self, engine: FakeEngine, num_right: int) -> None:
        self._engine = engine
        self._num_right = num_right

    def propose(
        self, sequence: Any, known: IntArray, num_in_flight: int, max_drafts: int
    ) -> IntArray:
        prompt = sequence.group.request.prompt_token_ids.tolist()
        truth = expected(self._engine, prompt, 40, sequence.group.request.seed)
        at = len(known) - len(prompt) + num_in_flight
        right = truth[at : at + self._num_right]
        mask = mask_after(truth[: at + len(right)], V)
        banned = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little") == 0)[0])
        return np.array([*right, banned, 5][:max_drafts], np.int32)


@DEPTHS
@pytest.mark.parametrize("num_right", [0, 1, 4])
def test_drafts_on_is_off(depth, num_right, monkeypatch):
    """One mask for each position to verify."""
    steps: list[int] = []
    for drafts in (False, True):
        engine = make(depth=depth, max_num_seqs=4)
        sent = Sent(engine, monkeypatch)
        if drafts:
            engine.scheduler._drafts._proposer = Drafts(engine, num_right)
        handles = [engine.add([i, 5, 9], max_tokens=20, seed=i, grammar=SPEC)[0] for i in range(3)]
        engine.run()
        for i, handle in enumerate(handles):
            assert engine.tokens[handle] == expected(engine, [i, 5, 9], 20, i)
        steps.append(engine.core.stats().steps_total)
        most = max(int(late.counts.max(initial=0)) for late in sent.inputs)
        assert most == (num_right + 3 if drafts else 1)
    assert steps[1] <= steps[0]
    if num_right == 4:
        assert steps[1] < steps[0]


@DEPTHS
@pytest.mark.parametrize("num_right", [0, 1, 4])
def test_drafts_that_a_model_makes_in_the_step_have_masks_too(depth, num_right, monkeypatch):
    """The plan does not know them: turns red when masks are of other drafts than are verified."""
    config = '{"method": "draft_model", "model": "fake", "num_speculative_tokens": 6}'
    engine = make(depth=depth, max_num_seqs=4, speculative_config=config)
    eager_policy(monkeypatch)
    sent = Sent(engine, monkeypatch)
    executor = engine.executor

    def make_drafts(slot: int) -> None:
        rows, stream = executor._rows, executor._streams[slot]
        prompt, end = rows.prompt_ids(slot).tolist(), int(rows.num_tokens[slot])
        truth = expected(engine, prompt, 40, stream.seed)[end - len(prompt) :]
        drafts = [*truth[:num_right], 5, 5][: int(rows.num_drafts[slot])]
        rows.token_ids[slot, end : end + len(drafts)] = drafts
        rows.num_drafts[slot] = len(drafts)

    monkeypatch.setattr(executor, "_make_drafts", make_drafts)
    handles = [engine.add([i, 5, 9], max_tokens=20, seed=i, grammar=SPEC)[0] for i in range(3)]
    engine.run()
    for i, handle in enumerate(handles):
        assert engine.tokens[handle] == expected(engine, [i, 5, 9], 20, i)
    assert max(int(late.counts.max(initial=0)) for late in sent.inputs) == num_right + 3
    accepted = engine.scheduler._drafts.totals.accepted
    assert (accepted > 30) == (num_right == 4)
    assert (accepted > 10) == (num_right > 0)


@DEPTHS
def test_beams_find_what_is_allowed(depth):
    engine = make(depth=depth)
    rules = BeamRules(3)
    handles = engine.add([3, 1, 4], n=3, max_tokens=6, grammar=SPEC, beams=rules)
    engine.run()

    def scores(tokens: tuple[int, ...]) -> np.ndarray:
        allowed = engine.model.allowed(mask_after(tokens[3:], V))
        masked = np.full(V, -np.inf)
        masked[allowed] = engine.model.expected_scores(tokens)[allowed]
        return masked

    found = search(scores, [3, 1, 4], rules, 6).found
    for handle, one in zip(handles, found, strict=True):
        whole = engine.finished[handle].whole
        assert whole is not None
        assert tuple(whole.token_ids.tolist()) == one.tokens


@DEPTHS
@pytest.mark.parametrize("after", range(6))
def test_an_abort_releases_the_masks_of_steps_in_flight(depth, after):
    grammars = HashGrammars(V)
    engine = make(grammars, depth=depth)
    gone, stays = [engine.add([i, 2], seed=i, grammar=SPEC)[0] for i in range(2)]
    for _ in range(after):
        engine.step()
    engine.core.abort([gone])
    asked = len(grammars.outputs)
    engine.run()
    assert engine.finished[gone].reason is FinishReason.ABORT
    assert engine.tokens[stays] == expected(engine, [1, 2], 8, 1)
    theirs = set(map(tuple, prefixes(expected(engine, [1, 2], 8, 1))))
    assert set(grammars.outputs[asked:]) <= theirs, "masks were made for nobody"


def prefixes(tokens: Sequence[int]) -> list[Sequence[int]]:
    return [tokens[:i] for i in range(len(tokens) + 1)]


@DEPTHS
@pytest.mark.parametrize(
    "error", [RequestError("this is no grammar"), ValueError("boom"), BaseException("panic")]
)
@pytest.mark.parametrize("at", [0, 3])
def test_a_provider_that_fails_ends_its_own_request(depth, error, at):
    first = expected(make(), [1, 2], 8, 1)
    fails = FailsOnce(error) if at == 0 else lambda output: error if output == first[:at] else None
    engine = make(HashGrammars(V, fails), depth=depth)
    bad, good = [engine.add([i, 2], seed=i, grammar=SPEC)[0] for i in (1, 2)]
    (plain,) = engine.add([7, 7])
    engine.run()
    finish = engine.finished[bad]
    assert finish.reason is FinishReason.ERROR
    assert finish.is_request_fault
    assert str(error) in finish.message
    assert engine.tokens[bad] == first[:at]
    assert engine.tokens[good] == expected(engine, [2, 2], 8, 2)
    assert engine.tokens[plain] == engine.model.expected_tokens([7, 7], 8, 0)


class FailsOnce:
    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def __call__(self, output: Sequence[int]) -> BaseException | None:
        error, self._error = self._error, None
        return error


class TooFew(HashGrammars):
    def masks(self, output: IntArray, drafts: IntArray) -> list[Any]:
        return []


class TooNarrow(HashGrammars):
    """After the first row of a step."""

    def masks(self, output: IntArray, drafts: IntArray) -> list[Any]:
        self.outputs.append(())
        return [mask_after(output.tolist(), V)[: None if len(self.outputs) % 2 else 3]]


def test_a_provider_that_gives_narrow_masks_ends_its_own_request():
    engine = make(TooNarrow(V), depth=1)
    good, bad = [engine.add([i, 2], seed=i, grammar=SPEC, max_tokens=1)[0] for i in range(2)]
    engine.run()
    assert engine.tokens[good] == expected(engine, [0, 2], 1, 0)
    assert "width" in engine.finished[bad].message


def test_a_provider_that_gives_too_few_masks_ends_its_own_request():
    engine = make(TooFew(V))
    (bad,) = engine.add([1, 2], grammar=SPEC)
    (plain,) = engine.add([7, 7])
    engine.run()
    assert engine.finished[bad].reason is FinishReason.ERROR
    assert engine.tokens[plain] == engine.model.expected_tokens([7, 7], 8, 0)


@DEPTHS
def test_a_lost_step_releases_those_after_it(depth, monkeypatch):
    engine = make(depth=depth)
    (lost,) = engine.add([1, 2], grammar=SPEC)
    engine.step()
    end_step = engine.executor._end_step

    def fail(*_: object) -> StepResult:
        monkeypatch.setattr(engine.executor, "_end_step", end_step)
        raise EngineError("the device is gone")

    monkeypatch.setattr(engine.executor, "_end_step", fail)
    engine.run()
    assert engine.finished[lost].reason is FinishReason.ERROR
    (handle,) = engine.add([1, 2], grammar=SPEC)
    engine.run()
    assert engine.tokens[handle] == expected(engine, [1, 2])


def test_a_core_that_forgets_its_promise_is_found(monkeypatch):
    """The fake executor does not draw without the masks that it awaits."""
    engine = make()
    engine.add([1, 2], grammar=SPEC)
    monkeypatch.setattr(engine.core, "_give_late_input", lambda *, wait: None)
    with pytest.raises(EngineError, match="awaits late input"):
        engine.run()


def test_grammars_are_refused_where_there_are_none_and_when_they_are_none():
    engine = FakeEngine()
    with pytest.raises(RequestError, match="structured output"):
        engine.add([1], grammar=SPEC)
    engine = make()
    with pytest.raises(RequestError, match="refused at once"):
        engine.add([1], grammar=GrammarSpec(GrammarKind.REGEX, "refused"))
    (late,) = engine.add([1], grammar=GrammarSpec(GrammarKind.REGEX, "x"))
    engine.run()
    assert engine.finished[late].is_request_fault
    assert engine.finished[late].message == "no grammar: x"


@DEPTHS
def test_a_request_is_blocked_until_its_grammar_is_there_and_others_go_on(depth):
    grammars = HashGrammars(V)
    engine = make(grammars, depth=depth)
    later = GrammarSpec(GrammarKind.REGEX, "later")
    waits = [engine.add([i, 2], seed=i, grammar=later)[0] for i in range(3)]
    samples = engine.add([5, 6], n=12, grammar=later)  # more than fit: groups of their own
    (plain,) = engine.add([7, 7])
    while plain not in engine.finished:
        engine.step()
    assert not any(engine.tokens[handle] for handle in (*waits, *samples))
    assert not engine.core.waits_for_input, "nobody would ask for the grammar any more"
    engine.core.abort([waits[0]])
    engine.step()
    assert grammars.later[0].cancelled(), "it is compiled for nobody"
    grammars.later[1].set_result(grammars)
    grammars.later[2].set_exception(ValueError("boom"))
    grammars.later[3].set_result(grammars)
    engine.run()
    assert engine.finished[waits[0]].reason is FinishReason.ABORT
    assert engine.tokens[waits[1]] == expected(engine, [1, 2], 8, 1)
    assert "boom" in engine.finished[waits[2]].message
    assert not engine.finished[waits[2]].is_request_fault
    for i, handle in enumerate(samples):
        assert engine.tokens[handle] == expected(engine, [5, 6], 8, 0, i)
    engine.core.shutdown()
    assert grammars.is_closed


@DEPTHS
def test_plain_requests_need_no_late_input(depth, monkeypatch):
    engine = make(depth=depth)
    engine.add([1, 2], grammar=SPEC)
    engine.run()
    sent = Sent(engine, monkeypatch)
    (handle,) = engine.add([7, 7], n=1)
    engine.run()
    assert engine.tokens[handle] == engine.model.expected_tokens([7, 7], 8, 0)
    assert sent.inputs == []
