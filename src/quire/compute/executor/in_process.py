"""Runs steps in a thread of this process, so that planning continues while a step computes."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from quire.base.errors import EngineError
from quire.compute.executor.launched_step import LaunchedStep
from quire.compute.lora.bank import HostAdapter
from quire.compute.runner.pending import FinishedStep, PendingStep
from quire.compute.worker import Worker
from quire.protocol.adapters import AdapterRef
from quire.protocol.block_moves import BlockMove, MoveOutcome
from quire.protocol.control import ControlOp, Report
from quire.protocol.media import MediaInfo
from quire.protocol.step import IntArray, LateInput, StepPlan

__all__ = ["InProcessExecutor"]


@dataclass(frozen=True, slots=True)
class _Drop:
    """Media to forget after the steps before it."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Put:
    """An adapter that takes its slot after the steps before it."""

    slot: int
    adapter: HostAdapter
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Move:
    """Blocks that go to the disk or come back after the steps before it."""

    move: BlockMove
    done: Future[MoveOutcome]


@dataclass(frozen=True, slots=True)
class _Cancel:
    """A move to end at once; it was given before."""

    ticket: int


_Work = tuple[StepPlan, LaunchedStep] | _Drop | _Put | _Move | _Cancel


class InProcessExecutor:
    """One worker, and a thread that launches its steps. Torch and the C++ kernels release the
    interpreter lock. On a device, a step is launched while the one before it computes; a second
    thread waits for the results, in order."""

    def __init__(
        self,
        make_worker: Callable[[], Worker],
        on_fault: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        """make_worker: called by `start` in the launching thread, because the math libraries keep
        thread settings per thread; its errors are raised there. on_fault: called with the error
        that ended a whole step."""
        self._on_fault = on_fault
        self._process_id = os.getpid()
        self._launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-worker")
        self._waiter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-results")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-adapters")
        self._lock = threading.Lock()
        self._to_do: deque[_Work] = deque()
        self._is_launching = False
        self._last_end = 0.0
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._is_started = False

    def start(self) -> Report:
        self._is_started = True
        try:
            self._worker = self._launcher.submit(self._make_worker).result()
            return self._launcher.submit(self._worker.measure).result()
        except BaseException:
            self.shutdown()
            raise

    def control(self, op: ControlOp) -> Report:
        """Runs in the launching thread."""
        worker = self._require_worker()
        return self._launcher.submit(worker.control, op).result()

    def check(self) -> None:
        """Raise EngineError if no steps can be taken."""
        self._require_worker()

    def _require_worker(self) -> Worker:
        if self._worker is None:
            what = "has been shut down" if self._is_started else "was not started"
            raise EngineError(f"the engine {what}: start a new one")
        if os.getpid() != self._process_id:
            raise EngineError(
                f"the engine's thread stayed in process {self._process_id} when this one was "
                "forked from it: start a new engine here"
            )
        return self._worker

    def execute(self, plan: StepPlan) -> LaunchedStep:
        launched = LaunchedStep()
        self._do(self._require_worker(), (plan, launched))
        return launched

    def _do(self, worker: Worker, work: _Work) -> None:
        """Runs in the launching thread, in the order of the calls."""
        with self._lock:
            if not self._is_launching:
                self._launcher.submit(self._do_all, worker)
                self._is_launching = True
            self._to_do.append(work)

    def put_media(self, handle: int, data: object) -> MediaInfo:
        """Runs in the caller's thread, beside a step."""
        return self._require_worker().put_media(handle, data)

    def media_bytes(self, handle: int) -> bytes:
        """Return the rows that the worker has under a handle, for `Worker.put_rows` of others."""
        return self._require_worker().media_bytes(handle)

    def drop_media(self, handles: Sequence[int]) -> None:
        if self._worker is not None:
            self._do(self._worker, _Drop(tuple(handles)))

    def put_adapter(self, slot: int, ref: AdapterRef) -> Future[None]:
        """Read the adapter in a thread of its own."""
        worker, done = self._require_worker(), Future[None]()

        def read() -> None:
            try:
                self._do(worker, _Put(slot, worker.read_adapter(ref), done))
            except BaseException as error:  # noqa: BLE001  whoever waits is where it belongs
                done.set_exception(error)

        self._reader.submit(read)
        return done

    def read_adapter(self, ref: AdapterRef) -> None:
        """Read an adapter into memory for a later `put_adapter`. Raises RequestError as there."""
        self._require_worker().read_adapter(ref)

    def move_blocks(self, move: BlockMove) -> Future[MoveOutcome]:
        done = Future[MoveOutcome]()
        self._do(self._require_worker(), _Move(move, done))
        return done

    def cancel_move(self, ticket: int) -> None:
        self._do(self._require_worker(), _Cancel(ticket))

    def late(self, late: LateInput) -> None:
        self._require_worker().late(late)

    def made_drafts(self, step_id: int, *, wait: bool) -> Mapping[int, IntArray] | None:
        return self._require_worker().made_drafts(step_id, wait=wait)

    def _do_all(self, worker: Worker) -> None:
        """Work until the queue is empty, so that a step planned meanwhile starts at once."""
        while True:
            with self._lock:
                if not self._to_do:
                    self._is_launching = False
                    return
                work = self._to_do.popleft()
            if isinstance(work, _Drop):
                worker.drop_media(work.handles)
            elif isinstance(work, _Put):
                self._put(worker, work)
            elif isinstance(work, _Move):
                self._move(worker, work)
            elif isinstance(work, _Cancel):
                worker.cancel_move(work.ticket)
            else:
                self._launch(worker, *work)

    def _put(self, worker: Worker, work: _Put) -> None:
        try:
            worker.put_adapter(work.slot, work.adapter)
        except BaseException as error:  # noqa: BLE001  as above
            work.done.set_exception(error)
        else:
            work.done.set_result(None)

    def _move(self, worker: Worker, work: _Move) -> None:
        try:
            worker.start_move(work.move, work.done)
        except BaseException as error:  # noqa: BLE001  as above
            work.done.set_exception(error)

    def _launch(self, worker: Worker, plan: StepPlan, launched: LaunchedStep) -> None:
        started = time.perf_counter()
        try:
            step = worker.launch(plan)
        except BaseException as error:  # noqa: BLE001  whoever waits is where a fault belongs
            self._on_fault(error)
            launched.fail(error)
            return
        if step.is_over:
            launched.end(step, self._note_end(started))
        else:
            self._waiter.submit(self._await, step, started, launched)

    def _await(self, step: PendingStep, started: float, launched: LaunchedStep) -> None:
        try:
            result = step.result()
        except BaseException as error:  # noqa: BLE001  as above
            launched.fail(error)
            return
        launched.end(FinishedStep(result), self._note_end(started))

    def _note_end(self, started: float) -> float:
        """Note the end of a step launched at `started`. Returns the seconds that it computed: from
        its launch, or from the end of the step before it."""
        ended = time.perf_counter()
        seconds = ended - max(started, self._last_end)
        self._last_end = ended
        return seconds

    def shutdown(self) -> None:
        """Drop the steps that were not launched yet, and give their waiters the error."""
        with self._lock:
            while self._to_do:
                work = self._to_do.popleft()
                error = EngineError("the engine was shut down before it did this")
                if isinstance(work, _Put | _Move):
                    work.done.set_exception(error)
                elif not isinstance(work, _Drop | _Cancel):
                    work[1].fail(error)
        if self._worker is not None:
            self._worker.give_up_waiting()
        self._reader.shutdown(wait=True)
        self._launcher.shutdown(wait=True)
        self._waiter.shutdown(wait=True)
        if self._worker is not None:
            self._worker.close()
        self._worker = None
