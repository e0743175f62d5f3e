"""Operations between steps, over the fake model: nothing stale is ever read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.base.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    QuireError,
    RequestError,
)
from quire.protocol import FinishReason
from quire.protocol.adapters import AdapterRef
from quire.protocol.control import (
    ControlOp,
    Inspect,
    ListPins,
    Pause,
    PauseMode,
    Report,
    ResetPrefixCache,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)
from tests.engine.fake_engine import FakeEngine
from tests.executor.fake import FakeExecutor
from tests.pairs import LAWS_BY_PAIRS

pytestmark = LAWS_BY_PAIRS

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
WINDOWS = pytest.mark.parametrize("windows", [(None,), (6,), (None, 5, None, 5)])
PROMPTS = [list(range(i, 14 + i)) for i in range(4)]


def control(engine: FakeEngine, op: ControlOp) -> Report:
    while not engine.core.is_ready_for(op):
        engine.step()
    report = engine.core.control(op, engine.now)
    engine.core.check_invariants()
    return report


def started(depth: int, windows: tuple[int | None, ...] = (None,), n: int = 1) -> FakeEngine:
    """An engine in the middle of four requests, with steps in flight."""
    engine = FakeEngine(depth=depth, windows=windows, num_blocks=200)
    for prompt in PROMPTS:
        engine.add(prompt, max_tokens=12, n=n)
    for _ in range(5):
        engine.step()
    return engine


def check_all(engine: FakeEngine, n: int = 1) -> None:
    for i, (handle, tokens) in enumerate(sorted(engine.tokens.items())):
        expected = engine.model.expected_tokens(PROMPTS[i // n], 12, 0, handle % n)
        assert tokens == expected
        assert engine.finished[handle].reason is FinishReason.LENGTH


@DEPTHS
@WINDOWS
@pytest.mark.parametrize(
    "op",
    [
        Sleep(1, "keep"),
        Sleep(2, "keep"),
        ResetPrefixCache(reset_running=True),
        ResetPrefixCache(),
        UpdateWeights({}),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_kept_streams_go_on_as_if_nothing_had_been(depth, windows, op, n):
    """The fake executor fills all memory with garbage when it sleeps."""
    engine = started(depth, windows, n)
    control(engine, op)
    control(engine, Wake())
    engine.run()
    check_all(engine, n)
    assert engine.core.stats().num_used_blocks == 0


@DEPTHS
def test_a_paused_engine_plans_nothing_and_loses_nothing(depth):
    engine = started(depth)
    assert control(engine, Pause("keep")).is_paused
    while not engine.core.waits_for_input:
        engine.step()  # what was in flight
    steps = engine.core.stats().steps_total
    (late,) = engine.add(PROMPTS[0], max_tokens=3)
    for _ in range(3):
        engine.step()
    assert engine.core.stats().steps_total == steps
    assert not engine.finished
    assert not control(engine, Resume()).is_paused
    engine.run()
    assert engine.tokens.pop(late) == engine.model.expected_tokens(PROMPTS[0], 3, 0)
    check_all(engine)


@DEPTHS
def test_wait_serves_who_was_admitted_and_admits_nobody(depth):
    engine = started(depth)
    late = [engine.add([7, 8, 9])[0] for _ in range(9)]  # more than there are slots
    report = control(engine, Pause("wait"))
    assert report.is_paused
    while engine.core.has_unfinished and not engine.core.waits_for_input:
        engine.step()
    assert sorted(engine.finished) == [0, 1, 2, 3]
    control(engine, Resume())
    engine.run()
    for handle in late:
        assert engine.tokens.pop(handle) == engine.model.expected_tokens([7, 8, 9], 8, 0)
    check_all(engine)


@DEPTHS
@pytest.mark.parametrize("op", [Pause("abort"), Sleep(1), Sleep(2)])
def test_abort_ends_all(depth, op):
    engine = started(depth)
    control(engine, op)
    while engine.core.has_unfinished:
        engine.step()
    assert {finish.reason for finish in engine.finished.values()} == {FinishReason.ABORT}
    assert engine.core.stats().num_used_blocks == 0


@DEPTHS
def test_a_sleeping_engine_refuses_and_wakes(depth):
    engine = FakeEngine(depth=depth)
    engine.add(PROMPTS[0])
    engine.run()
    report = control(engine, Sleep(2))
    assert (report.sleep_level, report.is_paused, report.kernel_family) == (2, True, "fake")
    with pytest.raises(EngineUnavailableError, match="wake it up"):
        engine.add(PROMPTS[0])
    with pytest.raises(RequestError, match="wake it up instead"):
        control(engine, Resume())
    report = control(engine, Wake())
    assert (report.sleep_level, report.is_paused) == (0, False)
    assert control(engine, Wake()) == report == control(engine, Inspect())
    (handle,) = engine.add(PROMPTS[0])
    engine.run()
    assert engine.tokens[handle] == engine.model.expected_tokens(PROMPTS[0], 8, 0)
    assert engine.num_cached[handle] == 0


@pytest.mark.parametrize("level", [0, 3, -1])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_level_that_is_none_changes_nothing(level, mode: PauseMode):
    """Turns red when admission stays closed, or requests end for nothing."""
    engine = started(2)
    with pytest.raises(RequestError, match=f"sleep level is {level}"):
        control(engine, Sleep(level, mode))
    (late,) = engine.add([7, 8, 9])
    engine.run()
    assert engine.tokens.pop(late) == engine.model.expected_tokens([7, 8, 9], 8, 0)
    check_all(engine)


@DEPTHS
def test_who_stops_waiting_for_a_pause_goes_on(depth):
    """Ctrl-C does this."""
    engine = started(depth)
    assert not engine.core.is_ready_for(Pause("wait"))
    engine.core.stop_waiting()
    (late,) = engine.add([7, 8, 9])
    engine.run()
    assert engine.tokens.pop(late) == engine.model.expected_tokens([7, 8, 9], 8, 0)
    check_all(engine)


def test_ctrl_c_in_the_last_wait_of_a_pause_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when admission stays closed for ever."""
    engine = FakeEngine()
    assert engine.core.is_ready_for(Pause("wait"))
    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "_settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.core.control(Pause("wait"), engine.now)
    (handle,) = engine.add(PROMPTS[0])
    engine.run()
    assert engine.tokens[handle] == engine.model.expected_tokens(PROMPTS[0], 8, 0)


def interrupted() -> None:
    raise KeyboardInterrupt


@DEPTHS
def test_what_passes_a_waiting_pause_admits_nobody(depth):
    engine = started(depth)
    assert not engine.core.is_ready_for(Pause("wait"))
    engine.core.control(ResetPrefixCache(), engine.now)
    (late,) = engine.add([7, 8, 9])
    while len(engine.finished) < len(PROMPTS):
        engine.step()
    assert not engine.tokens[late]
    engine.core.stop_waiting()
    engine.run()
    assert engine.tokens.pop(late) == engine.model.expected_tokens([7, 8, 9], 8, 0)
    check_all(engine)


@DEPTHS
@pytest.mark.parametrize("resets", [True, False])
def test_nothing_is_hit_after_a_reset(depth, resets):
    engine = FakeEngine(depth=depth)
    for _ in range(2):
        engine.add(PROMPTS[0])
        engine.run()
        if resets:
            control(engine, ResetPrefixCache())
    assert engine.num_cached == {0: 0, 1: 0 if resets else 12}
    assert engine.core.stats().num_cached_blocks == (0 if resets else 5)


@DEPTHS
def test_new_weights_give_new_names(depth):
    """Requests that wait are named anew too: they must find blocks of others that come later."""
    engine = FakeEngine(depth=depth, max_num_seqs=1)
    handles = [engine.add(PROMPTS[0], max_tokens=6)[0] for _ in range(3)]
    engine.step()
    report = control(engine, UpdateWeights({"a": np.zeros(3)}))
    assert report.weights_version == 1
    handles += engine.add(PROMPTS[0], max_tokens=6)
    engine.run()
    assert [engine.num_cached[handle] for handle in handles] == [0, 12, 12, 12]
    for handle in handles:
        assert engine.tokens[handle] == engine.model.expected_tokens(PROMPTS[0], 6, 0)


def test_an_operation_that_fails_leaves_the_engine_as_it_was():
    engine = FakeEngine(depth=1)
    assert control(engine, ListPins()).pins == ()
    engine.core._executor.control = broken  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="no memory"):
        control(engine, UpdateWeights({}))
    (handle,) = engine.add(PROMPTS[0])
    engine.run()
    assert engine.tokens[handle] == engine.model.expected_tokens(PROMPTS[0], 8, 0)


def broken(_: ControlOp) -> Report:
    raise EngineError("no memory")


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pausing_twice_and_resuming_twice(mode: PauseMode):
    engine = FakeEngine()
    for op in (Pause(mode), Pause(mode), Resume(), Resume()):
        control(engine, op)
    (handle,) = engine.add(PROMPTS[0])
    engine.run()
    assert engine.tokens[handle] == engine.model.expected_tokens(PROMPTS[0], 8, 0)


class FailsToLoad:
    """Loses all K/V while it loads new weights, and then cannot load them. wakes: whether it has
    the old ones again."""

    def __init__(self, executor: FakeExecutor, *, wakes: bool) -> None:
        self._executor = executor
        self._wakes = wakes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def control(self, op: ControlOp) -> Report:
        if not isinstance(op, UpdateWeights):
            return self._executor.control(op)
        self._executor.control(Sleep(2))
        if self._wakes:
            self._executor.control(Wake())
        raise EngineError("no memory for the new weights")


@DEPTHS
@pytest.mark.parametrize("wakes", [True, False])
def test_new_weights_that_cannot_be_loaded_leave_nothing_stale(depth: int, wakes: bool) -> None:
    """Fault: requests and cached prefixes go on with the garbage that the failed try has left; or
    the engine sleeps and does not know it."""
    engine = started(depth)
    core = engine.core
    core._executor = FailsToLoad(core._executor, wakes=wakes)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="no memory"):
        control(engine, UpdateWeights({}))
    core.check_invariants()
    assert bool(core.report.sleep_level) is core.report.is_paused is (not wakes)
    if not wakes:
        with pytest.raises(EngineUnavailableError):
            engine.add(PROMPTS[0])
        while not core.waits_for_input:
            engine.step()  # what was in flight
        control(engine, Wake())
    engine.run()
    check_all(engine)
    (again,) = engine.add(PROMPTS[0], max_tokens=12)
    engine.run()
    assert engine.tokens[again] == engine.tokens[0]


@pytest.mark.parametrize("error", [ConfigError, RequestError])
def test_refused_weights_cost_no_prefix(error: type[QuireError]) -> None:
    engine = started(1)
    engine.run()

    class Refuses(FailsToLoad):
        def control(self, op: ControlOp) -> Report:
            raise error(f"{type(op).__name__}: no such tensor")

    engine.core._executor = Refuses(engine.core._executor, wakes=True)  # type: ignore[arg-type]
    with pytest.raises(error, match="no such tensor"):
        control(engine, UpdateWeights({}))
    (again,) = engine.add(PROMPTS[0])
    engine.run()
    assert engine.num_cached[again] > 0


@DEPTHS
@pytest.mark.parametrize("op", [Pause("keep"), Sleep(1, "keep"), Sleep(2, "keep")])
def test_a_request_is_not_opened_while_the_engine_sleeps(depth: int, op: ControlOp) -> None:
    """Fault: its adapter was put into memory that was not there; and a core that slept did not wait
    for input, so that it never ended a drain. A pause opens it, since it may have to be refused."""
    engine = FakeEngine(depth=depth, num_adapter_slots=1)
    (handle,) = engine.add(PROMPTS[0], max_tokens=12, adapter=AdapterRef("a", "/a", "1"))
    control(engine, op)
    assert engine.core.waits_for_input == isinstance(op, Sleep)
    for _ in range(3):
        engine.step()
    assert bool(engine.executor.adapters) == isinstance(op, Pause)
    assert engine.core.waits_for_input
    control(engine, Resume() if isinstance(op, Pause) else Wake())
    assert not engine.core.waits_for_input
    engine.run()
    assert engine.tokens[handle] == engine.model.expected_tokens(PROMPTS[0], 12, 0, adapter="1")
