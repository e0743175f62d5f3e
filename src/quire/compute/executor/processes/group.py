"""Starts, watches and ends the processes of the ranks beside the core's own."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from quire.base.errors import ConfigError, EngineError, EngineLostError, RequestError
from quire.base.platform.processes import state_of
from quire.base.platform.shared_region import SharedRegion
from quire.compute.executor.processes.messages import RankLaunch, RankMessage, RankReply
from quire.compute.executor.processes.ring import RingWriter, create_ring
from quire.protocol.codec import Codec, GarbledMessageError, launch_bytes, read_exactly

__all__ = ["RANK_COMMAND", "RankGroup", "error_of"]

logger = logging.getLogger("quire")

RANK_COMMAND = (sys.executable, "-m", "quire.compute.executor.processes.rank_process")
WATCH_S = 0.1
SILENT_S = 0.6
"""Seconds without a beat after which a stopped rank (SIGSTOP) is ended. A rank that merely gets no
processor time is not stopped, and has longer."""
MUTE_S = 30.0
PAUSED_S = 2.0
"""A look at the ranks that took this long says nothing about them: this process was stopped too."""
FIRST_BEAT_S = 180.0
"""Limit for the first beat; a process beats once it has imported its libraries."""
END_S = 5.0
_ERRORS = {"engine": EngineError, "settings": ConfigError, "request": RequestError}


@dataclass(slots=True)
class _Rank:
    """A rank's process. replies: pipe of its answers. moved: pipe of the ends of its moves. pidfd:
    readable when the process has ended."""

    rank: int
    process: subprocess.Popen[bytes]
    replies: int
    moved: int
    pidfd: int
    beats: int = 0
    last_beat: float = 0.0


class RankGroup:
    """The ranks 1 … size - 1 of a model, or some of them; rank 0 is in this process or on another
    host. One thread starts and watches them, because the kernel ends them together with the thread
    that started them.

    on_lost: called once, in that thread, with the reason, when a rank has ended or hangs. The other
    ranks are ended then, and threads that wait in an exchange are released.
    """

    def __init__(
        self,
        launch: RankLaunch,
        on_lost: Callable[[str], None],
        command: tuple[str, ...] = RANK_COMMAND,
        ranks: Sequence[int] = (),
    ) -> None:
        """launch: launch of rank 0, without descriptors. ranks: ranks to start here;
        all if empty."""
        self.region = SharedRegion.create(launch.size)
        self._launch = launch
        self._on_lost = on_lost
        self._command = command
        self._ranks: list[_Rank] = []
        self._is_started = threading.Event()
        self._is_ending = threading.Event()
        self._start_error: BaseException | None = None
        self._lost = ""
        self._is_serving = False
        self._codec: Codec[RankReply] = Codec(RankReply)
        self._numbers = tuple(ranks) or tuple(range(1, launch.size))
        self._wakeups = [os.eventfd(0, os.EFD_CLOEXEC) for _ in self._numbers]
        self._ring_descriptor = create_ring()
        region = self.region
        self._ring = RingWriter(self._ring_descriptor, self._wakeups, lambda: region.is_aborted)
        self._watcher = threading.Thread(target=self._run, name="quire-ranks", daemon=True)

    def start(self) -> None:
        """Start the processes; `replies` tells how that ended. Raises EngineError if they cannot be
        started."""
        self._watcher.start()
        self._is_started.wait()
        if self._start_error is not None:
            raise EngineError(f"a rank's process cannot be started: {self._start_error}")

    @property
    def meeting(self) -> SharedRegion:
        """The region in which rank 0 meets the others."""
        return self.region

    @property
    def reply_pipes(self) -> dict[int, int]:
        """The pipe of each rank's answers, for a reader that replaces `replies`."""
        return {each.rank: each.replies for each in self._ranks}

    @property
    def moved_pipes(self) -> list[int]:
        """The pipe of each rank's ended moves."""
        return [each.moved for each in self._ranks]

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [each.process.pid for each in self._ranks]

    def send(self, kind: RankMessage, message: bytes) -> None:
        """Send a message to all ranks. Raises EngineLostError if one is missing."""
        self.check()
        try:
            self._ring.write(kind, message)
        except EngineError:
            self.check()
            raise

    def check(self) -> None:
        """Raise EngineLostError if a rank is lost."""
        if self._lost:
            raise EngineLostError(f"{self._lost}: start a new engine")

    def replies(self) -> list[RankReply]:
        """Wait for one answer of each rank. Raises the first error among them."""
        found, missing = list[RankReply](), list[int]()
        for each in self._ranks:
            try:
                length = int.from_bytes(read_exactly(each.replies, 4), "big")
                found.append(self._codec.decode(read_exactly(each.replies, length)))
            except (EOFError, OSError, GarbledMessageError):
                missing.append(each.rank)
        for reply in found:
            if reply.error:
                raise error_of(reply)
        if missing:
            self._lose(f"rank {missing[0]} ended without an answer")
            self.check()
            raise EngineLostError("the ranks were shut down before all had answered")
        return found

    def first_failed(self, error: BaseException) -> None:
        """Tell the group that a step of rank 0 ended outside of the common order. The other ranks
        would wait for it in vain, or meet it in another step."""
        self._lose(f"rank 0 failed ({type(error).__name__}: {error})")

    def serve(self) -> None:
        """The start has succeeded: call `on_lost` from now on. Raises EngineLostError if a rank is
        already lost."""
        self._is_serving = True
        self.check()

    # --- in the watching thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            for reader, rank in enumerate(self._numbers):
                self._ranks.append(self._spawn(rank, reader))
        except OSError as error:
            self._start_error = error
            self._kill()
            return
        finally:
            self._is_started.set()
        while not self._is_ending.is_set():
            reason = self._look()
            if reason and not self._is_ending.is_set():
                self._lose(reason)
                return
        self._await_end()

    def _spawn(self, rank: int, reader: int) -> _Rank:
        read, write = os.pipe()
        moved_read, moved_write = os.pipe()
        try:
            launch = msgspec.structs.replace(
                self._launch,
                rank=rank,
                parent_pid=os.getpid(),
                region=self.region.descriptor,
                ring=self._ring_descriptor,
                reader=reader,
                wakeup=self._wakeups[reader],
                replies=write,
                moved=moved_write,
            )
            process = self._start_process(
                (launch.region, launch.ring, launch.wakeup, launch.replies, launch.moved)
            )
        except BaseException:
            os.close(read)
            os.close(moved_read)
            raise
        finally:
            os.close(write)
            os.close(moved_write)
        assert process.stdin is not None, "started with a pipe"
        with contextlib.suppress(OSError):  # it has already ended, which the next look finds
            process.stdin.write(launch_bytes(launch))
            process.stdin.flush()
        pidfd = os.pidfd_open(process.pid)
        return _Rank(rank, process, read, moved_read, pidfd, last_beat=time.monotonic())

    def _start_process(self, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        """Start what reads a `RankLaunch` from its standard input and runs a rank."""
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
        )

    def _look(self) -> str:
        """Wait a little. Return the reason if the group is over."""
        poll = select.poll()
        for each in self._ranks:
            poll.register(each.pidfd, select.POLLIN)
        looked_at = time.monotonic()
        ended = [number for number, _ in poll.poll(WATCH_S * 1000)]
        for each in self._ranks:
            if each.pidfd in ended:
                return f"rank {each.rank} (process {each.process.pid}) {_end_of(each.process)}"
        beats, now = self.region.beats(), time.monotonic()
        if now - looked_at > PAUSED_S:
            for each in self._ranks:
                each.last_beat = now
            return ""
        for each in self._ranks:
            if beats[each.rank] != each.beats:
                each.beats, each.last_beat = beats[each.rank], now
            silence = now - each.last_beat
            limit = MUTE_S if each.beats else FIRST_BEAT_S
            if silence > limit or (silence > SILENT_S and state_of(each.process.pid).is_stopped):
                return (
                    f"rank {each.rank} (process {each.process.pid}) has been stopped or hangs: no "
                    f"sign of life for {silence:.1f} s"
                )
        return ""

    def _lose(self, reason: str) -> None:
        if self._is_ending.is_set() or self._lost:
            return
        self._lost = reason
        if self._is_serving:
            logger.error("%s; the other ranks are ended", reason)
            self._on_lost(reason)
        self._kill()

    def _kill(self) -> None:
        self.region.abort()
        for each in self._ranks:
            each.process.kill()
        for each in self._ranks:
            each.process.wait()

    def _await_end(self) -> None:
        """Close the ranks' input, which ends them, and kill those that do not end."""
        deadline = time.monotonic() + END_S
        for each in self._ranks:
            assert each.process.stdin is not None, "started with a pipe"
            with contextlib.suppress(OSError):
                each.process.stdin.close()
        for each in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(deadline - time.monotonic(), 0.0))
        self._kill()

    def shutdown(self) -> None:
        """End all ranks and wait for them; `replies` ends too. May be called twice, and while other
        threads are in a method."""
        self._is_ending.set()
        self.region.abort()
        if self._watcher.ident is not None:
            self._watcher.join()

    def close(self) -> None:
        """Close all descriptors, after `shutdown`, when no other thread is in a method. May be
        called twice."""
        for each in self._ranks:
            for descriptor in (each.replies, each.moved, each.pidfd):
                os.close(descriptor)
            assert each.process.stdin is not None, "started with a pipe"
            with contextlib.suppress(OSError):
                each.process.stdin.close()
        self._ranks.clear()
        for descriptor in (self._ring_descriptor, *self._wakeups):
            if descriptor >= 0:
                os.close(descriptor)
        self._ring_descriptor, self._wakeups = -1, []
        self.region.close()


def error_of(reply: RankReply) -> Exception:
    """Return the error in a rank's answer."""
    return _ERRORS[reply.at_fault](reply.error)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    status = process.wait()
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
