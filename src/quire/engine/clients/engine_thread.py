"""A thread of this process that computes: the engine of `AsyncLLM`."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.base.errors import EngineUnavailableError, RequestError
from quire.engine.clients.in_process import EngineClient
from quire.protocol.control import RESUMED, ControlOp, Pause, Resume, Sleep, Wake
from quire.protocol.request import EngineOutput

__all__ = ["EngineThread"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of the thread. op: the operation that it is, which may have to wait. future: gets what
    it returns or raises."""

    do: Callable[[EngineClient], Any]
    op: ControlOp | None
    future: Future[Any]


class EngineThread:
    """The thread that computes. Whatever is done to the engine is done there, between steps."""

    def __init__(
        self,
        client: EngineClient,
        on_output: Callable[[EngineOutput], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """on_output, on_death: called in the thread."""
        self._client = client
        self._on_output = on_output
        self._on_death = on_death
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._waiting: list[_Work] = []  # a pause that is not ready, and pauses after it
        self._lock = threading.Lock()  # of taking work, against the end
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a step must not meet an interpreter that is gone

    def do(
        self,
        work: Callable[[EngineClient], T],
        op: ControlOp | None = None,
    ) -> Future[T]:
        """Have the thread do it; its result, or what it raised. op: the operation that it is. While
        the engine is not ready for that, steps go on, as other work does but for pauses."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_over:
                future.set_exception(_over())
            else:
                self._work.put(_Work(work, op, future))
        return future

    def stop(self) -> None:
        """Compute nothing more, and free the engine. May be called twice."""
        atexit.unregister(self.stop)
        if self._thread.is_alive():
            self._work.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        client = self._client
        try:
            while self._do_work(client):
                if client.has_unfinished and not client.waits_for_input:
                    self._on_output(client.step())
        except BaseException as error:  # noqa: BLE001  told to everybody who waits
            self._on_death(error)
        finally:
            self._end()
            client.shutdown()

    def _do_work(self, client: EngineClient) -> bool:
        """Do what waits; where nothing is to be computed, wait for more. False at the end."""
        while True:
            self._do_waiting(client)
            is_idle = not client.has_unfinished or client.waits_for_input
            try:
                item = self._work.get(block=is_idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item.op, Resume | Wake):
                self._end_waits(client)
            is_behind = bool(self._waiting) and isinstance(item.op, Pause | Sleep)
            if is_behind or not self._try(client, item):
                self._waiting.append(item)

    def _do_waiting(self, client: EngineClient) -> None:
        """Do what has become ready, in order; forget what nobody wants any more."""
        if not self._waiting:
            return
        wanted = [item for item in self._waiting if not item.future.cancelled()]
        if len(wanted) < len(self._waiting):
            client.stop_waiting()
        self._waiting = wanted
        while wanted and self._try(client, wanted[0]):
            del wanted[0]

    def _end_waits(self, client: EngineClient) -> None:
        """Do what need not wait, and refuse the rest."""
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            if self._try(client, item):
                continue
            client.stop_waiting()
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(RequestError(RESUMED))

    def _try(self, client: EngineClient, item: _Work) -> bool:
        """Do it if it is ready, and say whether it was."""
        if item.op is not None and not client.is_ready_for(item.op):
            return False
        if not item.future.set_running_or_notify_cancel():
            client.stop_waiting()
            return True
        try:
            item.future.set_result(item.do(client))
        except BaseException as error:  # noqa: BLE001  whoever waits gets it
            item.future.set_exception(error)
        return True

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
        left, self._waiting = list[_Work | None](self._waiting), []
        while not self._work.empty():
            left.append(self._work.get())
        for item in left:
            if item is not None and item.future.set_running_or_notify_cancel():
                item.future.set_exception(_over())


def _over() -> EngineUnavailableError:
    return EngineUnavailableError("this AsyncLLM was shut down or has died: make another one")
