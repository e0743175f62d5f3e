"""A few threads for work on text that may take long or never end.

A thread cannot be ended from outside. One that exceeds its time is abandoned and replaced, so that
other work goes on. Their number is bounded, and all threads are daemons, so none keeps the process
from ending.
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
"""Most abandoned threads, per thread of the pool."""

Result = TypeVar("Result")


class _Job:
    """A job. is_left: its time ran out while it ran. is_replaced: another thread has taken the
    place of its own. The pool's lock guards all but the future."""

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.has_started = False
        self.has_ended = False
        self.is_left = False
        self.is_replaced = False


class RenderPool:
    """A pool for one event loop. `close` may be called during work; its results are dropped."""

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        """timeout_s: most seconds from the call of `run` to the result."""
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
        """Number of abandoned threads."""
        return self._num_left

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread and return its result. Raises what it raises, and RefusedError if
        it takes too long: 400, or 503 if no thread was free to begin it."""
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future())
        job.timer = loop.call_later(self._timeout_s, self._expire, job)
        self._jobs.put(job)
        return await job.future

    def close(self) -> None:
        """End the threads, each after its present job."""
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
                f"The chat template, the tokenizer or the tools took more than {limit}. Shorten "
                "the prompt, or send fewer tools."
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
        # One call per job, so that a waiting thread keeps nothing of its last job alive.
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Wait for a job and run it. Returns True if this thread should go on."""
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
        except StopIteration as caught:  # a future can't hold it
            error = RuntimeError("StopIteration left the work of a thread")
            error.__cause__ = caught
        except BaseException as caught:  # noqa: BLE001  it belongs to the one that waits
            error = caught
        with self._lock:
            job.has_ended = True
            self._num_left -= job.is_left
            self._num_threads -= job.is_replaced
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            job.future.get_loop().call_soon_threadsafe(_finish, job, result, error)
        del error  # its traceback holds this frame, which would hold the future
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
