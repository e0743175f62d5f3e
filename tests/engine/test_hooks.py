"""Output hooks over the fake model: text that they let pass, hold, replace and end."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quire.base.errors import ConfigError, EngineError, RequestError
from quire.engine.core.hook_runner import HookRunner
from quire.engine.core.hook_session import TokenTexts
from quire.hooks import HOLD, PASS, Answer, End, Pass, Replace, Unsent, WatchedSequence
from quire.hooks.load import HookSet, load_hooks
from quire.protocol import EngineRequest, FinishReason
from quire.protocol.beam_search import BeamRules
from tests.engine.fake_engine import FakeEngine
from tests.engine.hash_grammar import SPEC, HashGrammars, mask_after
from tests.pairs import LAWS_BY_PAIRS
from tests.waiting import WAIT_S, wait_for

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
NO_ERRORS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""Exceptions other than errors that code may raise."""
V = 1000
PROMPT = [4, 9, 2, 7, 5]

Judge = Callable[[Unsent], Answer]


class Hook:
    """Answers by a function. seen: tokens that it was asked about. began: sequences that it
    watches."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.seen: list[Unsent] = []
        self.began: list[WatchedSequence] = []

    def watch(self, sequence: WatchedSequence) -> Hook:
        self.began.append(sequence)
        return self

    def judge(self, unsent: Unsent) -> Answer:
        self.seen.append(unsent)
        return self._judge(unsent)


def make(
    hooks: HookSet, *, time_limit_s: float = WAIT_S, texts: Any = None, **settings: Any
) -> tuple[FakeEngine, HookRunner]:
    runner = HookRunner(hooks, texts or TokenTexts(None), time_limit_s)
    settings = {"num_blocks": 200, "vocab_size": V, **settings}
    return FakeEngine(hooks=runner, **settings), runner


def always(*judges: Judge) -> HookSet:
    return HookSet(always={f"hook {i}": Hook(judge) for i, judge in enumerate(judges)})


def run(engine: FakeEngine) -> None:
    engine.run(max_steps=100_000)


def odd_to_even(unsent: Unsent) -> Answer:
    """Puts two tokens in place of every seventh one."""
    if unsent.token_ids and unsent.token_ids[-1] % 7 == 1:
        last = unsent.token_ids[-1]
        return Replace(len(unsent.token_ids) - 1, ((last + 1) % V, (3 * last) % V))
    return PASS if unsent.is_last or sum(unsent.token_ids) % 3 else HOLD


def edited(
    engine: FakeEngine, prompt: Sequence[int], count: int, seed: int, sample: int, *, masked: bool
) -> list[int]:
    """The output that `odd_to_even` makes, token by token and without a cache."""
    output: list[int] = []
    while len(output) < count:
        known = [*prompt, *output]

        def mask(_: Any, so_far: list[int] = output) -> Any:
            return mask_after(so_far, V)

        if masked:
            (token,) = engine.model.expected_tokens(known, 1, seed, sample, mask)
        else:
            (token,) = engine.model.expected_tokens(known, 1, seed, sample)
        output += [(token + 1) % V, (3 * token) % V] if token % 7 == 1 else [token]
    return output[:count]


@DEPTHS
@pytest.mark.parametrize("windows", [(None,), (6,)], ids=str)
@pytest.mark.parametrize("num_blocks", [200, 34])
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_are_those_of_one_token_after_the_other(
    depth: int, windows: tuple[int | None, ...], num_blocks: int, masked: bool
) -> None:
    """However late the verdicts come: with samples, grammars and preemption."""
    engine, runner = make(
        always(odd_to_even),
        depth=depth,
        windows=windows,
        num_blocks=num_blocks,
        grammars=HashGrammars(V),
    )
    grammar = SPEC if masked else None
    handles = [
        engine.add([*PROMPT, i], max_tokens=30, n=1 + i % 3, seed=i, grammar=grammar)
        for i in range(6)
    ]
    run(engine)
    for i, samples in enumerate(handles):
        for sample, handle in enumerate(samples):
            wanted = edited(engine, [*PROMPT, i], 30, i, sample, masked=masked)
            assert engine.tokens[handle] == wanted, (i, sample)
            assert engine.finished[handle].reason is FinishReason.LENGTH
    if num_blocks == 34:
        assert engine.core.stats().preempted_total > 0
    assert not runner._sessions
    engine.core.shutdown()


@DEPTHS
def test_what_is_not_watched_pays_nothing(depth: int) -> None:
    offered = HookSet(offered={"odd": Hook(odd_to_even)})
    plain, (engine, runner) = FakeEngine(depth=depth, num_blocks=200), make(offered, depth=depth)
    for each in (plain, engine):
        for i in range(4):
            each.add([*PROMPT, i], max_tokens=20, n=1 + i % 2, seed=i)
        each.run()
    assert engine.tokens == plain.tokens
    assert engine.core.stats().steps_total == plain.core.stats().steps_total
    assert runner.num_threads == runner.num_calls == 0
    assert not engine.scheduler.state.table.has_watched
    (watched,) = engine.add([*PROMPT, 1], max_tokens=20, seed=1, hooks=("odd",))
    (beside,) = engine.add([*PROMPT, 2], max_tokens=20, seed=2)
    run(engine)
    assert engine.tokens[beside] == engine.model.expected_tokens([*PROMPT, 2], 20, 2)
    assert engine.tokens[watched] == edited(engine, [*PROMPT, 1], 20, 1, 0, masked=False)
    assert runner.num_calls > 10


@DEPTHS
def test_a_hook_is_asked_once_per_token_about_what_is_not_sent(depth: int) -> None:
    hook = Hook(lambda u: PASS if u.is_last or len(u.token_ids) == 3 else HOLD)
    engine, _ = make(HookSet(always={"three": hook}), depth=depth)
    (handle,) = engine.add(PROMPT, max_tokens=8)
    run(engine)
    tokens = engine.model.expected_tokens(PROMPT, 8, 0)
    assert engine.tokens[handle] == tokens
    wanted = [tokens[i - i % 3 : i + 1] for i in range(8)]
    assert [list(unsent.token_ids) for unsent in hook.seen] == wanted
    assert [unsent.is_last for unsent in hook.seen] == [False] * 7 + [True]
    (began,) = hook.began
    assert (list(began.prompt_token_ids), list(began.sent_token_ids)) == (PROMPT, [])


@DEPTHS
def test_held_tokens_are_computed_and_not_sent(depth: int) -> None:
    engine, _ = make(always(lambda u: PASS if u.is_last else HOLD), depth=depth)
    (handle,) = engine.add(PROMPT, max_tokens=30)
    most = 0
    while engine.core.has_unfinished:
        engine.step()
        table = engine.scheduler.state.table
        if not engine.finished and table.live.any():
            assert not engine.tokens[handle]
            most = max(most, int(table.num_known[table.live].max()))
    assert most > len(PROMPT) + 20
    assert engine.tokens[handle] == engine.model.expected_tokens(PROMPT, 30, 0)


@DEPTHS
@pytest.mark.parametrize("num_kept", [0, 1])
def test_a_hook_ends_a_sequence(depth: int, num_kept: int) -> None:
    """Only the one it was asked about: samples go on."""
    tokens = FakeEngine(vocab_size=V).model.expected_tokens(PROMPT, 8, 0, 1)

    def judge(unsent: Unsent) -> Answer:
        return End("no", num_kept) if unsent.token_ids[-1] == tokens[3] else PASS

    engine, _ = make(always(judge), depth=depth)
    handles = engine.add(PROMPT, n=3, max_tokens=8)
    run(engine)
    finish = engine.finished[handles[1]]
    assert (finish.reason, finish.message) == (FinishReason.CONTENT_FILTER, "no")
    assert engine.tokens[handles[1]] == tokens[: 3 + num_kept]
    for sample in (0, 2):
        wanted = engine.model.expected_tokens(PROMPT, 8, 0, sample)
        assert engine.tokens[handles[sample]] == wanted
    assert engine.scheduler.stats().num_used_blocks == 0


@DEPTHS
def test_a_hook_may_have_a_sequence_go_on_after_its_stop_token(depth: int) -> None:
    tokens = FakeEngine(vocab_size=V).model.expected_tokens(PROMPT, 8, 0)
    stop = tokens[3]

    def judge(unsent: Unsent) -> Answer:
        return Replace(len(unsent.token_ids) - 1, (5,)) if unsent.is_last else PASS

    engine, _ = make(always(judge), depth=depth)
    (handle,) = engine.add(PROMPT, max_tokens=6, stop=frozenset([stop]))
    run(engine)
    assert engine.tokens[handle][:4] == [*tokens[:3], 5]
    finish = engine.finished[handle]
    assert finish.reason is FinishReason.ERROR  # it writes another end for ever
    assert "256 replacements" in finish.message


@DEPTHS
def test_a_resumed_sequence_tells_its_hook_what_was_sent(depth: int) -> None:
    """A core that dies takes the state of its hooks with it."""
    hook = Hook(odd_to_even)
    whole = edited(FakeEngine(vocab_size=V), PROMPT, 20, 3, 0, masked=False)
    engine, _ = make(HookSet(always={"odd": hook}), depth=depth)
    (handle,) = engine.add(PROMPT, max_tokens=20, seed=3, output=whole[:9])
    run(engine)
    assert engine.tokens[handle] == whole
    assert list(hook.began[0].sent_token_ids) == whole[:9]


def test_several_hooks_send_what_all_let_pass() -> None:
    first = Hook(lambda u: PASS if u.is_last else Pass(len(u.token_ids) // 2))
    second = Hook(lambda u: PASS if u.is_last else Pass(max(len(u.token_ids) - 1, 0)))
    hooks = HookSet(always={"first": first}, offered={"second": second})
    engine, _ = make(hooks)
    (handle,) = engine.add(PROMPT, max_tokens=6, hooks=("second",))
    run(engine)
    assert engine.tokens[handle] == engine.model.expected_tokens(PROMPT, 6, 0)
    assert [len(unsent.token_ids) for unsent in second.seen] == [1, 2, 2, 2, 2, 2]


@DEPTHS
def test_a_slow_hook_fails_its_request_and_nobody_waits(depth: int) -> None:
    """Not even requests that other hooks, or the same one, watch."""
    release = threading.Event()

    def slow(unsent: Unsent) -> Answer:
        if len(unsent.token_ids) == 1 and threading.current_thread() is not threading.main_thread():
            release.wait(WAIT_S)
        return PASS

    hooks = HookSet(offered={"slow": Hook(slow), "quick": Hook(lambda unsent: PASS)})
    engine, runner = make(hooks, depth=depth)
    slow_ones = [engine.add([*PROMPT, i], max_tokens=20, hooks=("slow",))[0] for i in range(3)]
    others = [
        engine.add([*PROMPT, 7], max_tokens=20)[0],
        engine.add([*PROMPT, 8], max_tokens=20, hooks=("quick",))[0],
    ]
    while not all(handle in engine.finished for handle in others):
        engine.step()
    assert not any(engine.tokens[handle] for handle in slow_ones)
    runner._time_limit_s = 0.3  # the quick ones, for which a busy machine needs longer, have ended
    run(engine)
    for handle in slow_ones:
        assert engine.finished[handle].reason is FinishReason.ERROR
        assert "'slow' took longer than 0.3 s" in engine.finished[handle].message
    for handle in others:
        assert len(engine.tokens[handle]) == 20
    assert len(runner._lost) == 3
    release.set()
    wait_for(lambda: not any(thread.is_busy for thread in runner._lost), "end of the slow hooks")
    engine.add(PROMPT, hooks=("quick",))
    assert not runner._lost
    run(engine)


def test_too_many_hooks_that_hang_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.core.hook_runner.MAX_LOST_THREADS", 1)
    release = threading.Event()
    slow = Hook(lambda unsent: PASS if release.wait(WAIT_S) else HOLD)
    engine, _ = make(HookSet(offered={"slow": slow}), time_limit_s=0.05)
    engine.add(PROMPT, hooks=("slow",))
    run(engine)
    with pytest.raises(EngineError, match="have not returned"):
        engine.add(PROMPT, hooks=("slow",))
    engine.add(PROMPT)
    run(engine)
    release.set()


@DEPTHS
@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (ValueError("no such state"), "no such state"),
        *((raised("gone"), f"{raised.__name__}('gone')") for raised in NO_ERRORS),
        (None, "the answer None"),
        (Pass(3), "Pass(num_tokens=3) of 1"),
        (Pass(-1), "Pass(num_tokens=-1) of 1"),
        (Replace(2, (4,)), "of 1 unsent tokens"),
        (Replace(0), "no tokens"),
        (Replace(0, (-4,)), "no tokens"),
        (End("x", 4), "of 1 unsent tokens"),
    ],
)
def test_a_hook_that_fails_costs_its_own_request(depth: int, answer: Any, sentence: str) -> None:
    """Fault: an error that is no `Exception` ended the hook's thread, and counted as slow."""

    def judge(unsent: Unsent) -> Answer:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    engine, runner = make(HookSet(offered={"bad": Hook(judge)}), depth=depth)
    bad = engine.add(PROMPT, n=2, hooks=("bad",))
    (good,) = engine.add([*PROMPT, 1])
    run(engine)
    for handle in bad:
        finish = engine.finished[handle]
        assert finish.reason is FinishReason.ERROR
        assert "'bad' failed" in finish.message
        assert sentence in finish.message
        assert not engine.tokens[handle]
    assert engine.tokens[good] == engine.model.expected_tokens([*PROMPT, 1], 8, 0)
    assert not runner._lost


def test_a_watch_that_exits_costs_its_own_request() -> None:
    class Leaves:
        def watch(self, sequence: WatchedSequence) -> Hook:
            raise SystemExit(3)

    engine, runner = make(HookSet(offered={"bad": Leaves()}))
    (bad,) = engine.add(PROMPT, hooks=("bad",))
    run(engine)
    assert "'bad' failed (SystemExit(3))" in engine.finished[bad].message
    assert not runner._lost


def test_nothing_may_be_held_at_the_end() -> None:
    """Text that a filter has not let pass never reaches a client."""
    engine, _ = make(always(lambda unsent: HOLD))
    (handle,) = engine.add(PROMPT)
    run(engine)
    assert not engine.tokens[handle]
    assert "at the end of the output" in engine.finished[handle].message


@DEPTHS
@pytest.mark.parametrize("after", range(8))
def test_an_abort_ends_the_watch(depth: int, after: int) -> None:
    engine, runner = make(always(odd_to_even), depth=depth)
    gone, *stay = engine.add(PROMPT, n=3, max_tokens=12)
    for _ in range(after):
        engine.step()
    engine.core.abort([gone])
    run(engine)
    assert engine.finished[gone].reason in (FinishReason.ABORT, FinishReason.LENGTH)
    for sample, handle in enumerate(stay, 1):
        assert engine.tokens[handle] == edited(engine, PROMPT, 12, 0, sample, masked=False)
    engine.core._consult(runner)
    assert not runner._sessions
    assert not runner._asked


def test_names_that_nobody_offers_are_refused() -> None:
    engine, _ = make(HookSet(offered={"calm": Hook(odd_to_even)}))
    with pytest.raises(RequestError, match=r"'wild'.*It has: calm"):
        engine.add(PROMPT, hooks=("wild",))
    with pytest.raises(RequestError, match="without output hooks"):
        FakeEngine().add(PROMPT, hooks=("calm",))
    with pytest.raises(RequestError, match="beam search is not offered"):
        engine.add(PROMPT, hooks=("calm",), beams=BeamRules(2))


class TwoByTwo:
    """Texts for token ids: each is its number."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def stream(self, request: EngineRequest) -> Any:
        return self

    def append(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)

    def finish(self) -> str:
        return ""


@DEPTHS
def test_texts_stay_with_their_tokens(depth: int) -> None:
    """Also after some were replaced by a text."""

    def judge(unsent: Unsent) -> Answer:
        assert unsent.texts == tuple(f"<{token}>" for token in unsent.token_ids)
        if unsent.token_ids and unsent.token_ids[-1] % 7 == 1:
            return Replace(len(unsent.token_ids) - 1, text="5 6 12")
        return PASS if unsent.is_last or sum(unsent.token_ids) % 3 else HOLD

    engine, _ = make(always(judge), depth=depth, texts=TwoByTwo())
    handles = engine.add(PROMPT, n=4, max_tokens=30)
    run(engine)
    for handle in handles:
        assert engine.finished[handle].reason is FinishReason.LENGTH, engine.finished[handle]
    text = " ".join(" ".join(map(str, engine.tokens[handle])) for handle in handles)
    assert "5 6 12" in text


def test_hooks_are_loaded_by_name() -> None:
    found = load_hooks(["tests.engine.test_hooks:Plain", "calm=tests.engine.test_hooks:plain"])
    assert isinstance(found.always["tests.engine.test_hooks:Plain"], Plain)
    assert found.offered["calm"] is plain
    own = Hook(odd_to_even)
    assert load_hooks([own, {"mine": own}]) == HookSet({"Hook": own}, {"mine": own})


class Plain:
    def watch(self, sequence: WatchedSequence) -> Hook:
        return Hook(lambda unsent: PASS)


plain = Plain()


def leave() -> Hook:
    sys.exit(3)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["no_such_module_anywhere:x"], "cannot be loaded"),
        (["tests.engine.test_hooks:nothing"], "cannot be loaded"),
        (["tests.engine.test_hooks:PROMPT"], "no method watch"),
        ([3], "no method watch"),
        (["tests.engine.test_hooks:leave"], r"cannot be loaded \(SystemExit\(3\)\)"),
        ([plain, Plain()], "two output hooks have the name 'Plain'"),
    ],
)
def test_what_is_no_hook_stops_the_start(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_hooks(given)
