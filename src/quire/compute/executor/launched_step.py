"""A step that one thread launches and another one waits for."""

from __future__ import annotations

import threading
from dataclasses import replace

from quire.compute.runner.pending import PendingStep
from quire.protocol.step import StepResult

__all__ = ["LaunchedStep"]


class LaunchedStep:
    """A `StepFuture` around one lock.

    The launching thread finds cold caches after each step, because all weights have passed through
    them. The conditions of `concurrent.futures` then take 0.06 ms, a lock half of that (measured,
    0.6 B in 4 bits). So the launching thread does little, and the waiting thread does the rest
    beside the next step.
    """

    __slots__ = ("_ended", "_error", "_is_over", "_result", "_seconds", "_step")

    def __init__(self) -> None:
        self._is_over = False
        self._ended = threading.Lock()  # held until the step has ended
        self._ended.acquire()
        self._step: PendingStep | None = None
        self._seconds = 0.0
        self._error: BaseException | None = None
        self._result: StepResult | None = None

    def end(self, step: PendingStep, seconds: float) -> None:
        """Wake the waiting threads. step: the finished step. seconds: its duration."""
        self._step, self._seconds = step, seconds
        self._release()

    def fail(self, error: BaseException) -> None:
        """Give the waiting threads this error."""
        self._error = error
        self._release()

    def _release(self) -> None:
        self._is_over = True
        self._ended.release()

    def done(self) -> bool:
        return self._is_over

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that ended the step, None if it has a result. Raises TimeoutError after
        `timeout` seconds."""
        self._wait(timeout)
        return self._error

    def result(self, timeout: float | None = None) -> StepResult:
        """Return the result. Raises the error that ended the step, or TimeoutError after `timeout`
        seconds."""
        self._wait(timeout)
        if self._error is not None:
            raise self._error
        if self._result is None:
            assert self._step is not None
            self._result = replace(self._step.result(), seconds=self._seconds)
        return self._result

    def _wait(self, timeout: float | None) -> None:
        if self._is_over:
            return
        if not self._ended.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"the step did not end within {timeout} s")
        self._ended.release()
