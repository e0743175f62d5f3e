"""A step that fails as a whole ends the requests in it; those that wait are served."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest

from quire.base.platform.interrupts import held
from quire.protocol import FinishReason, StepPlan, StepResult
from tests.engine.fake_engine import FakeEngine
from tests.pairs import BY_PAIRS


class Unreliable:
    """Loses the step with the given number."""

    def __init__(self, executor, lost: int, error: BaseException | None = None) -> None:
        self._executor = executor
        self._lost = lost
        self._error = error or RuntimeError("device fault")

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        if plan.step_id != self._lost:
            return self._executor.execute(plan)
        future: Future[StepResult] = Future()
        future.set_exception(self._error)
        return future

    def shutdown(self) -> None:
        self._executor.shutdown()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("lost", range(12))
def test_only_requests_in_flight_are_lost(depth: int, lost: int) -> None:
    engine = FakeEngine(depth=depth, num_blocks=24, max_num_seqs=2, max_num_batched_tokens=8)
    engine.core._executor = Unreliable(engine.core._executor, lost)
    prompts = [[i] * 9 for i in range(5)]
    handles = [engine.add(prompt, seed=i)[0] for i, prompt in enumerate(prompts)]
    engine.run()
    reasons = [engine.finished[handle].reason for handle in handles]
    assert 1 <= reasons.count(FinishReason.ERROR) <= 2
    for i, handle in enumerate(handles):
        expected = engine.model.expected_tokens(prompts[i], 8, i)
        if reasons[i] is FinishReason.ERROR:
            assert "device fault" in engine.finished[handle].message
            assert engine.tokens[handle] == expected[: len(engine.tokens[handle])]
        else:
            assert engine.tokens[handle] == expected
    assert engine.core.stats().num_used_blocks == 0


def test_an_exit_within_a_step_is_a_lost_step() -> None:
    """An exception in the thread that computes must not end the caller's program."""
    engine = FakeEngine()
    engine.core._executor = Unreliable(engine.core._executor, 1, SystemExit(3))
    (handle,) = engine.add([1, 2, 3])
    engine.run()
    assert engine.finished[handle].reason is FinishReason.ERROR


class Interrupting:
    """Raises KeyboardInterrupt in the wait for a step, once."""

    def __init__(self, executor, step_id: int) -> None:
        self._executor = executor
        self._step_id = step_id

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future = self._executor.execute(plan)
        if plan.step_id == self._step_id:
            wait, waits = future.result, iter([KeyboardInterrupt])

            def result(timeout: float | None = None) -> StepResult:
                for error in waits:
                    raise error
                return wait(timeout)

            future.result = result
        return future


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_ctrl_c_in_the_wait_for_a_step_loses_nothing(depth: int) -> None:
    """The wait is where Ctrl-C nearly always arrives. A caller that goes on gets that step's
    result."""
    engine = FakeEngine(depth=depth)
    engine.core._executor = Interrupting(engine.core._executor, 2)
    (handle,) = engine.add([1, 2, 3], seed=7)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert engine.tokens[handle] == engine.model.expected_tokens([1, 2, 3], 8, 7)


class PressingCtrlC:
    """A trace that raises SIGINT before the line with a number of those that the plan side runs."""

    def __init__(self, line: int) -> None:
        self.lines_left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> PressingCtrlC | None:
        name = frame.f_code.co_filename
        if not any(room in name for room in ("engine/core/", "quire/plan/scheduler/")):
            return None
        if event == "line":
            self.lines_left -= 1
            if not self.lines_left:
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_anywhere_in_a_step_loses_nothing(depth: int) -> None:
    """Turns red when it cuts planning or a result short, and the next result is another step's."""
    prompts = [[i] * 9 for i in range(3)]
    num_interrupted = 0
    for line in range(1, 3000, 97):
        engine = FakeEngine(depth=depth)
        handles = [engine.add(prompt, seed=i)[0] for i, prompt in enumerate(prompts)]
        pressing, before = PressingCtrlC(line), sys.gettrace()
        sys.settrace(pressing)
        try:
            while engine.core.has_unfinished:
                with held():
                    engine.step()
        except KeyboardInterrupt:
            num_interrupted += 1
        finally:
            sys.settrace(before)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        engine.run()
        for i, handle in enumerate(handles):
            assert engine.tokens[handle] == engine.model.expected_tokens(prompts[i], 8, i)
    assert num_interrupted > 10


class Cutting:
    """Is cut short as it takes a step, or just after it has, by what no step raises."""

    def __init__(self, executor: Any, step_id: int, *, has_taken: bool) -> None:
        self._executor = executor
        self._step_id = step_id
        self._has_taken = has_taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        if plan.step_id != self._step_id:
            return self._executor.execute(plan)
        if self._has_taken:
            self._executor.execute(plan)
        raise KeyboardInterrupt


@BY_PAIRS
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("has_taken", [True, False])
@pytest.mark.parametrize("step_id", range(6))
def test_a_step_that_is_cut_short_is_lost(depth: int, has_taken: bool, step_id: int) -> None:
    """A signal handler may raise anywhere. Turns red when a result then is another step's, for
    ever."""
    engine = FakeEngine(depth=depth, max_num_seqs=2, max_num_batched_tokens=8)
    engine.core._executor = Cutting(engine.core._executor, step_id, has_taken=has_taken)
    prompts = [[i] * 9 for i in range(5)]
    handles = [engine.add(prompt, seed=i)[0] for i, prompt in enumerate(prompts)]
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    lost = [h for h in handles if engine.finished[h].reason is FinishReason.ERROR]
    assert 1 <= len(lost) <= 2
    assert "cut it short" in engine.finished[lost[0]].message
    for i, handle in enumerate(handles):
        expected = engine.model.expected_tokens(prompts[i], 8, i)
        is_lost = handle in lost
        assert engine.tokens[handle] == (
            expected[: len(engine.tokens[handle])] if is_lost else expected
        )
    assert engine.core.stats().num_used_blocks == 0
