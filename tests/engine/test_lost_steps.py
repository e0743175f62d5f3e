"""A step that fails as a whole ends the requests in it; those that wait are served."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from quire.protocol import FinishReason, StepPlan, StepResult
from tests.engine.fake_engine import FakeEngine


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
    """What is raised in the thread that computes must not end the caller's program."""
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
    """The wait is where Ctrl-C nearly always arrives: whoever goes on gets that step's result."""
    engine = FakeEngine(depth=depth)
    engine.core._executor = Interrupting(engine.core._executor, 2)
    (handle,) = engine.add([1, 2, 3], seed=7)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert engine.tokens[handle] == engine.model.expected_tokens([1, 2, 3], 8, 7)
