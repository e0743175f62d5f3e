"""A few threads for work on text that may take long, or never end.

A thread cannot be ended from outside. One whose work is over its time is left to itself and
replaced, so that the others are served on; how many may be left so is bounded, and since all are
daemons none of them keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from quire.server.requests.errors import RefusedError

__all__ = ["RenderPool"]

LEFT_PER_THREAD = 4
"""So many threads per thread of the pool may be left to work that does not end."""

Result = TypeVar("Result")


class _Job:
    """is_left: it was over its time while it ran. is_replaced: another thread has taken the place
    of the one that runs it. All but the future is guarded by the lock of the pool."""

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.has_started = False
        self.has_ended = False
        self.is_left = False
        self.is_replaced = False


class RenderPool:
    """For one event loop. `close` may be called while work goes on: its results are dropped."""

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        """timeout_s: from the call of `run` to the result."""
        self._timeout_s = timeout_s
        self._max_left = LEFT_PER_THREAD * num_threads
        self._num_left = 0
        self._num_threads = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        for _ in range(num_threads):
            self._start_thread()

    @property
    def num_left(self) -> int:
        """Threads that are left to work that is over its time."""
        return self._num_left

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which runs in a thread. Raises what it raises, and RefusedError if
        it takes too long: 400, or 503 if no thread was free to begin it."""
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future())
        job.timer = loop.call_later(self._timeout_s, self._expire, job)
        self._jobs.put(job)
        return await job.future

    def close(self) -> None:
        """End the threads, each after what it does at the moment."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _expire(self, job: _Job) -> None:
        with self._lock:
            was_cancelled = job.future.done() and not job.has_started
            if job.has_ended or was_cancelled:
                return
            if job.has_started:
                job.is_left = True
                self._num_left += 1
                job.is_replaced = self._num_left <= self._max_left
            if job.is_replaced:
                self._start_thread()
        if not job.future.done():
            job.future.set_exception(self._refusal(job))

    def _refusal(self, job: _Job) -> RefusedError:
        limit = f"{self._timeout_s:g} s (render_timeout_s)"
        if job.has_started:
            return RefusedError(
                f"The chat template and the tokenizer took more than {limit}. Shorten the prompt."
            )
        return RefusedError(
            f"The prompt waited {limit} to be tokenized. Try again later.",
            status=503,
            retry_after_s=5,
        )

    def _start_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._serve, name="render", daemon=True).start()

    def _serve(self) -> None:
        # A call per job, so that a thread that waits keeps nothing of the one before alive.
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Wait for a job and run it. Return whether this thread should go on."""
        job = self._jobs.get()
        if job is None:
            return False
        with self._lock:
            if job.future.done():
                return True
            job.has_started = True
        result: Any = None
        error: BaseException | None = None
        try:
            result = job.work()
        except BaseException as caught:  # noqa: BLE001  it belongs to the one that waits
            error = caught
        with self._lock:
            job.has_ended = True
            self._num_left -= job.is_left
            self._num_threads -= job.is_replaced
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            job.future.get_loop().call_soon_threadsafe(_finish, job, result, error)
        del error  # its traceback holds this frame, which would hold it
        return not job.is_replaced


def _finish(job: _Job, result: object, error: BaseException | None) -> None:
    assert job.timer is not None, "set before the job is queued"
    job.timer.cancel()
    if job.future.done():
        return
    if error is None:
        job.future.set_result(result)
    else:
        job.future.set_exception(error)
