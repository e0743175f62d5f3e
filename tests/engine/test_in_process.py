"""The thread that launches steps: in order, each once, and none that nobody will launch."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.base.errors import EngineError
from quire.compute.executor.in_process import InProcessExecutor
from quire.compute.runner.pending import FinishedStep
from quire.protocol import StepPlan, StepResult
from quire.protocol.control import Report
from quire.protocol.step import EMPTY_INTS
from tests.waiting import WAIT_S


@dataclass
class Worker:
    """Launches a step when it may, and fails where a plan's number says so."""

    is_asked: threading.Event = field(default_factory=threading.Event)
    may_launch: threading.Event = field(default_factory=threading.Event)
    launched: list[int] = field(default_factory=list[int])
    lost: frozenset[int] = frozenset()

    def measure(self) -> Report:
        return Report()

    def launch(self, plan: StepPlan) -> FinishedStep:
        self.is_asked.set()
        assert self.may_launch.wait(WAIT_S)
        self.launched.append(plan.step_id)
        if plan.step_id in self.lost:
            raise SystemExit(f"step {plan.step_id}")
        return FinishedStep(StepResult(plan.step_id, EMPTY_INTS, EMPTY_INTS))

    def give_up_waiting(self) -> None:
        """No step of this worker awaits anything."""

    def close(self) -> None:
        self.launched.append(-1)


def executor_of(worker: Any) -> InProcessExecutor:
    executor = InProcessExecutor(lambda: worker)
    assert executor.start() == Report()
    return executor


def test_steps_are_launched_in_order_though_some_are_lost() -> None:
    """Turns red when a step is left behind by one that fails, or that begins as the last ends."""
    worker = Worker(lost=frozenset({0, 3}))
    executor = executor_of(worker)
    waiting = [executor.execute(StepPlan(i)) for i in range(5)]
    worker.may_launch.set()
    ended = [str(step.exception(WAIT_S) or step.result().step_id) for step in waiting]
    assert ended == ["step 0", "1", "2", "step 3", "4"]
    for i in range(5, 200):
        assert executor.execute(StepPlan(i)).result(WAIT_S).step_id == i
    assert worker.launched == list(range(200))
    executor.shutdown()


def test_a_step_that_was_not_launched_ends_with_the_executor() -> None:
    """Turns red when somebody may wait for it for ever, or the worker goes before its last step."""
    worker = Worker()
    executor = executor_of(worker)
    first, second = (executor.execute(StepPlan(i)) for i in range(2))
    assert worker.is_asked.wait(WAIT_S)
    ending = threading.Thread(target=executor.shutdown)
    ending.start()
    with pytest.raises(EngineError, match="shut down before"):
        second.result(WAIT_S)
    assert not first.done()
    with pytest.raises(TimeoutError, match="did not end"):
        first.result(0.01)
    worker.may_launch.set()
    ending.join(WAIT_S)
    assert first.result(0).step_id == 0
    assert worker.launched == [0, -1]


def test_a_step_that_no_thread_can_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a step waits for a thread that was never asked, as when a program ends."""
    worker = Worker()
    worker.may_launch.set()
    executor = executor_of(worker)
    with monkeypatch.context() as patched:
        patched.setattr(executor._launcher, "submit", _refuse)
        for i in range(2):
            with pytest.raises(RuntimeError, match="no thread"):
                executor.execute(StepPlan(i))
    assert executor.execute(StepPlan(2)).result(WAIT_S).step_id == 2
    assert worker.launched == [2]
    executor.shutdown()


def _refuse(*_: object) -> None:
    raise RuntimeError("no thread")
