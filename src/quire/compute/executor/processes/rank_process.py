"""A rank of a model as a process, started by `RankGroup`:

    python -m quire.compute.executor.processes.rank_process

Its standard input brings a `RankLaunch` and stays open while the core lives. The process ends when
the pipe closes, or when the thread that started it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from quire.base.errors import ConfigError, RequestError
from quire.base.platform import detect_platform
from quire.base.platform.shared_region import SharedRegion
from quire.base.platform.streams import claim_streams
from quire.base.telemetry.flight.stacks import StackFile
from quire.compute.executor.processes.messages import (
    RankAdapter,
    RankCancel,
    RankDrop,
    RankLaunch,
    RankMedia,
    RankMessage,
    RankMove,
    RankMoved,
    RankOp,
    RankReply,
    computes_with,
)
from quire.compute.executor.processes.ring import RingReader
from quire.compute.lora.bank import HostAdapter
from quire.compute.worker import Worker
from quire.compute.worker.planned import worker_settings
from quire.config.settings import EngineSettings
from quire.config.startup import StartupPlan, plan_startup
from quire.ops.distributed.gloo import GlooMeeting
from quire.ops.native.binding import see_kernels
from quire.protocol.block_moves import BlockMove, MoveOutcome
from quire.protocol.codec import Codec, encode, framed, read_message
from quire.protocol.control import WorkerOp
from quire.protocol.step import StepPlan
from quire.protocol.step_codec import decode_late, decode_plan

__all__ = ["main"]

logger = logging.getLogger("quire")

BEAT_S = 0.1
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class _Put:
    """An adapter that takes its slot after the steps before it."""

    slot: int
    adapter: HostAdapter


_Work = StepPlan | WorkerOp | _Put | BlockMove | RankCancel | RankDrop


def main() -> int:
    """Read the launch, load, and compute until told to stop. Returns the exit status."""
    claim_streams()
    try:
        launch = read_message(sys.stdin.fileno(), Codec[RankLaunch](RankLaunch))
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    logging.basicConfig(format=f"%(levelname)s rank {launch.rank}[{os.getpid()}] %(message)s")
    _die_with(launch.parent_pid)
    if launch.stacks is None:
        faulthandler.enable()
    else:
        StackFile(launch.stacks, f"rank {launch.rank}")
    # A shell sends these to whole groups of processes. They are meant for the front.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    region = SharedRegion(launch.region)
    _start_thread(_await_end_of_input, region)
    _start_thread(_beat, region, launch.rank)
    try:
        worker = _load(launch, region)
        report = worker.measure()
    except BaseException as error:  # also what a model of others raises
        if not isinstance(error, ConfigError):
            logger.exception("the rank cannot start")
        _reply(launch, _failure(error))
        return 1
    gc.freeze()
    _reply(launch, RankReply(computes_with=computes_with(report)))
    try:
        _Loop(launch, worker).run()
    except Exception:
        if region.is_aborted:
            return 0
        logger.exception("the rank cannot go on")
        return 1
    return 0


class _Loop:
    """Computes steps in the thread that loaded the model. Another thread takes messages, so that
    late input reaches a step that waits for it."""

    def __init__(self, launch: RankLaunch, worker: Worker) -> None:
        self._launch = launch
        self._worker = worker
        self._work = queue.SimpleQueue[_Work]()
        self._ops: Codec[RankOp] = Codec(RankOp)
        self._adapters: Codec[RankAdapter] = Codec(RankAdapter)
        self._moves: Codec[RankMove] = Codec(RankMove)
        self._cancels: Codec[RankCancel] = Codec(RankCancel)
        self._media: Codec[RankMedia] = Codec(RankMedia)
        self._drops: Codec[RankDrop] = Codec(RankDrop)
        self._telling = threading.Lock()

    def run(self) -> None:
        _start_thread(self._receive)
        while True:
            work = self._work.get()
            if isinstance(work, StepPlan):
                self._worker.execute(work)  # an error of a whole step ends this rank
            elif isinstance(work, _Put):
                self._worker.put_adapter(work.slot, work.adapter)
                _reply(self._launch, RankReply())
            elif isinstance(work, BlockMove):
                self._move(work)
            elif isinstance(work, RankCancel):
                self._worker.cancel_move(work.ticket)
            elif isinstance(work, RankDrop):
                self._worker.drop_media(work.handles)
            else:
                self._control(work)

    def _control(self, op: WorkerOp) -> None:
        try:
            costs = self._worker.control(op).recovery_costs
        except Exception as error:  # noqa: BLE001  whoever asked is told
            _reply(self._launch, _failure(error))
        else:
            _reply(self._launch, RankReply(recovery_costs=costs))

    def _move(self, move: BlockMove) -> None:
        done = Future[MoveOutcome]()

        def tell(ended: Future[MoveOutcome]) -> None:
            outcome = ended.result() if ended.exception() is None else move.all_lost
            message = encode(RankMoved(move.ticket, outcome.lost, outcome.seconds))
            with self._telling:  # moves end in several threads
                _write(self._launch.moved, message)

        done.add_done_callback(tell)
        self._worker.start_move(move, done)

    def _receive(self) -> None:
        ring = RingReader(self._launch.ring, self._launch.reader, self._launch.wakeup)
        try:
            while True:
                kind, data = ring.read()
                if kind == RankMessage.PLAN:
                    self._work.put(decode_plan(data))
                elif kind == RankMessage.LATE:
                    self._worker.late(decode_late(data))
                elif kind == RankMessage.CONTROL:
                    self._work.put(self._ops.decode(data).op)
                elif kind == RankMessage.READ_ADAPTER:
                    _start_thread(self._read_adapter, self._adapters.decode(data))
                elif kind == RankMessage.MOVE:
                    self._work.put(self._moves.decode(data).move)
                elif kind == RankMessage.CANCEL_MOVE:
                    self._work.put(self._cancels.decode(data))
                elif kind == RankMessage.MEDIA:
                    media = self._media.decode(data)
                    self._worker.put_rows(media.handle, media.num_rows, media.rows)
                elif kind == RankMessage.DROP_MEDIA:
                    self._work.put(self._drops.decode(data))
                else:
                    asked = self._adapters.decode(data)
                    self._work.put(_Put(asked.slot, self._worker.read_adapter(asked.ref)))
        except BaseException:
            logger.exception("the rank cannot read its plans")
            os._exit(1)

    def _read_adapter(self, asked: RankAdapter) -> None:
        """Read an adapter beside steps, so that it is in memory when it gets its slot."""
        try:
            self._worker.read_adapter(asked.ref)
        except Exception as error:  # noqa: BLE001  as above
            _reply(self._launch, _failure(error))
        else:
            _reply(self._launch, RankReply())


def _load(launch: RankLaunch, region: SharedRegion) -> Worker:
    meeting: SharedRegion | GlooMeeting = region
    if (asked := launch.meeting) is not None:
        meeting = GlooMeeting(launch.size, asked.host, asked.port, asked.address)
    return Worker(replace(worker_settings(_plan(launch), launch.rank), meeting=meeting))


def _plan(launch: RankLaunch) -> StartupPlan:
    """Repeat the core's plan: the same settings, machine and free memory give the same plan. Only
    rank 0 shows its progress."""
    platform = replace(
        see_kernels(detect_platform()),
        free_bytes=launch.free_bytes,
        memory_bytes=launch.memory_bytes,
    )
    settings = replace(EngineSettings.from_values(launch.settings), quiet=True)
    return plan_startup(settings, platform)


def _failure(error: BaseException) -> RankReply:
    if isinstance(error, ConfigError):
        return RankReply(str(error), "settings")
    if isinstance(error, RequestError):
        return RankReply(str(error), "request")
    return RankReply(f"{type(error).__name__}: {error}")


def _reply(launch: RankLaunch, reply: RankReply) -> None:
    _write(launch.replies, encode(reply))


def _write(pipe: int, message: bytes) -> None:
    data = framed(message)
    while data:
        data = data[os.write(pipe, data) :]


def _start_thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def _beat(region: SharedRegion, rank: int) -> None:
    pause = threading.Event()
    while True:
        region.beat(rank)
        pause.wait(BEAT_S)


def _await_end_of_input(region: SharedRegion) -> None:
    """End at once, with any step in progress: the core has ended, or ends this rank."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    region.abort()
    os._exit(0)


def _die_with(parent_pid: int) -> None:
    """Let the kernel kill this process with the thread that started it, even if it hangs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the thread died before the line above


if __name__ == "__main__":
    sys.exit(main())
