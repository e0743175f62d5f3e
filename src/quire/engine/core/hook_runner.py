"""Asks output hooks in threads of their own, so that no step waits for one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable

from quire.base.errors import EngineError, RequestError
from quire.engine.core.hook_session import HookSession, HookText
from quire.hooks import OutputHook
from quire.hooks.load import HookSet
from quire.plan.scheduler.constraints.unsent import Question, Verdict
from quire.protocol.request import EngineRequest

__all__ = ["HookRunner"]

_log = logging.getLogger("quire.hooks")

MAX_LOST_THREADS = 32
"""Number of hanging hooks from which on requests that would be watched are refused."""

Work = tuple[HookSession, Question]


class HookRunner:
    """Threads are started as they are needed: a hook that hangs keeps its own one, and no other
    sequence waits for it.

    num_threads: number of threads started. num_calls: calls of hooks for sequences that ended.
    """

    def __init__(self, hooks: HookSet, text: HookText, time_limit_s: float) -> None:
        self._hooks = hooks
        self._text = text
        self._time_limit_s = time_limit_s
        self._sessions: dict[int, HookSession] = {}
        self._asked: dict[int, HookSession] = {}
        self._done: queue.SimpleQueue[tuple[HookSession, Verdict]] = queue.SimpleQueue()
        self._idle: list[_HookThread] = []
        self._lost: list[_HookThread] = []
        self._threads: dict[HookSession, _HookThread] = {}
        self._ready: list[tuple[HookSession, Verdict]] = []
        self.num_threads = 0
        self.num_calls = 0

    @property
    def watches_all(self) -> bool:
        """True if some hooks watch the outputs of every request."""
        return bool(self._hooks.always)

    def watches(self, request: EngineRequest) -> bool:
        """Return whether any hook watches the outputs of this request."""
        return bool(self._hooks.always or request.params.hooks) and request.pin_seconds is None

    def check(self, request: EngineRequest) -> None:
        """RequestError if the request names a hook that is not offered, EngineError if too many
        hooks hang."""
        for name in request.params.hooks:
            if name not in self._hooks.offered:
                offered = ", ".join(self._hooks.offered) or "none"
                raise RequestError(
                    f"hooks names {name[:80]!r}, which this server does not offer. It has: "
                    f"{offered}."
                )
        self._idle += [thread for thread in self._lost if not thread.is_busy]
        self._lost = [thread for thread in self._lost if thread.is_busy]
        if len(self._lost) >= MAX_LOST_THREADS and self.watches(request):
            raise EngineError(
                f"{len(self._lost)} output hooks have not returned. Mend them and start the "
                "engine again."
            )

    def ask(self, questions: Iterable[Question]) -> None:
        """Begin to ask; the verdicts come later."""
        for question in questions:
            session = self._sessions.get(question.handle)
            if session is None:
                session = HookSession(self._of(question.request), question, self._text)
                self._sessions[question.handle] = session
            self._asked[question.handle] = session
            thread = self._idle.pop() if self._idle else self._new_thread()
            self._threads[session] = thread
            thread.run_soon((session, question))

    def _of(self, request: EngineRequest) -> dict[str, OutputHook]:
        asked = {name: self._hooks.offered[name] for name in request.params.hooks}
        return {**self._hooks.always, **asked}

    def _new_thread(self) -> _HookThread:
        self.num_threads += 1
        return _HookThread(self._done, self.num_threads)

    def verdicts(self) -> list[Verdict]:
        """Return the answers since the last call, and verdicts on hooks that were too slow."""
        found = [verdict for session, verdict in self._drain() if self._take(session, verdict)]
        now = time.monotonic()
        for session in list(self._threads):
            asked = session.asked
            if asked is None or now - asked[1] <= self._time_limit_s:
                continue
            self._lost.append(self._threads.pop(session))
            if self._asked.get(session.handle) is session:
                found.append(self._too_slow(session.handle, asked[0]))
        return found

    def _too_slow(self, handle: int, name: str) -> Verdict:
        _log.warning("the output hook %r has not answered in time", name)
        self._end(handle)
        message = (
            f"the output hook {name!r} took longer than {self._time_limit_s:g} s "
            "(output_hook_timeout): make it faster, or allow more time"
        )
        return Verdict(handle, failure=message)

    def _drain(self) -> list[tuple[HookSession, Verdict]]:
        found, self._ready = self._ready, []
        while True:
            try:
                found.append(self._done.get_nowait())
            except queue.Empty:
                return found

    def _take(self, session: HookSession, verdict: Verdict) -> bool:
        """Free the thread of a verdict, and return whether the verdict is still wanted."""
        thread = self._threads.pop(session, None)
        if thread is not None:
            self._idle.append(thread)
        if self._asked.get(verdict.handle) is not session:
            return False
        del self._asked[verdict.handle]
        if verdict.end is not None:
            _log.info("an output hook ended a sequence: %s", verdict.end)
        return True

    @property
    def is_busy(self) -> bool:
        """True if verdicts are to come."""
        return bool(self._asked)

    def wait(self, seconds: float) -> None:
        """Wait for the next verdict, at most so long."""
        try:
            self._ready.append(self._done.get(timeout=seconds))
        except queue.Empty:
            return

    def forget(self, handles: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for handle in handles:
            self._end(handle)

    def _end(self, handle: int) -> None:
        session = self._sessions.pop(handle, None)
        self._asked.pop(handle, None)
        if session is not None:
            self.num_calls += session.num_calls

    def close(self) -> None:
        """End the threads that do not hang. May be called twice."""
        for thread in (*self._idle, *self._threads.values(), *self._lost):
            thread.stop()
        self._idle.clear()


class _HookThread:
    """Runs one piece of work at a time. A daemon, since nothing ends a hook that hangs."""

    def __init__(self, done: queue.SimpleQueue[tuple[HookSession, Verdict]], number: int) -> None:
        self._done = done
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.is_busy = False
        name = f"quire-hook-{number}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def run_soon(self, work: Work) -> None:
        self.is_busy = True
        self._work.put(work)

    def stop(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            session, question = work
            verdict = session.answer(question)
            self.is_busy = False
            self._done.put((session, verdict))
