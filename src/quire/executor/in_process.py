"""Runs steps in a thread of this process, so that planning goes on while a step computes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from quire.errors import EngineError
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.step import StepPlan, StepResult
from quire.worker import Worker

__all__ = ["InProcessExecutor"]


class InProcessExecutor:
    """One worker, one thread. Torch and the C++ kernels release the interpreter lock."""

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        """make_worker: called in the thread, because thread settings of the math libraries belong
        to the thread that computes. What it raises is raised here."""
        self._process_id = os.getpid()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-worker")
        try:
            self._worker: Worker | None = self._thread.submit(make_worker).result()
        except BaseException:
            self._thread.shutdown(wait=True, cancel_futures=True)
            raise
        self.providers = self._worker.providers if self._worker else ""

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        if self._worker is None:
            raise EngineError("the engine has been shut down: start a new one")
        if os.getpid() != self._process_id:
            raise EngineError(
                f"the engine's thread stayed in process {self._process_id} when this one was "
                "forked from it: start a new engine here"
            )
        return self._thread.submit(_timed, self._worker, plan)

    def measure_recovery(self) -> RecoveryCosts:
        """As `Worker.measure_recovery`, in the thread that computes."""
        assert self._worker is not None
        return self._thread.submit(self._worker.measure_recovery).result()

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker = None


def _timed(worker: Worker, plan: StepPlan) -> StepResult:
    started = time.perf_counter()
    result = worker.execute(plan)
    return replace(result, seconds=time.perf_counter() - started)
