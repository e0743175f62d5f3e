"""The core's heartbeat: phases of its start, and progress of its present step."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import zmq
import zmq.asyncio

from quire.base.telemetry import EngineStats
from quire.protocol.codec import Codec, GarbledMessageError, encode
from quire.protocol.messages import Heartbeat
from quire.protocol.status import EngineCapacity, StartPhase

__all__ = ["HeartbeatThread", "Progress", "heartbeats"]

logger = logging.getLogger("quire")

STUCK_INTERPRETER_S = 300
"""After so long without a beat some C code holds the interpreter lock for good: the process ends
itself, with its stacks on standard error. Only this timer of the C library runs by then."""

RECENT_STEPS = 512


def heartbeat_address(directory: Path) -> str:
    return f"ipc://{directory}/heartbeat"


class Progress:
    """Written by the thread that runs steps, read by the one that beats. Every write is one
    assignment, so no lock is needed."""

    def __init__(self) -> None:
        self.capacity: EngineCapacity | None = None
        self.is_draining = False
        self.stats = EngineStats()
        self.sleep_state: tuple[int, int] = (0, 0)  # `Heartbeat.state_version` and `sleep_level`
        self._phases: tuple[tuple[str, float], ...] = ()  # name, when it began
        self._is_ready = False
        self._step_started: float | None = None
        self._recent = deque[float](maxlen=RECENT_STEPS)
        self._slowest = 0.0

    def enter(self, phase: str) -> None:
        """A phase of the start begins, and the one before has ended."""
        self._phases = (*self._phases, (phase, time.monotonic()))

    def ready(self, capacity: EngineCapacity) -> None:
        """The start has ended."""
        self.capacity = capacity
        self.enter("ready")
        self._is_ready = True

    def begin_step(self) -> None:
        self._step_started = time.monotonic()

    def end_step(self) -> float:
        """Seconds that the step took."""
        assert self._step_started is not None, "end_step follows begin_step"
        seconds, self._step_started = time.monotonic() - self._step_started, None
        if len(self._recent) == RECENT_STEPS and self._recent[0] >= self._slowest:
            self._recent.popleft()
            self._slowest = max(self._recent)
        self._recent.append(seconds)
        self._slowest = max(self._slowest, seconds)
        return seconds

    def reading(self, instance: int) -> Heartbeat:
        now, started = time.monotonic(), self._step_started
        phases = self._phases
        ends = [begin for _, begin in phases[1:]]
        done = [
            StartPhase(name, end - begin) for (name, begin), end in zip(phases, ends, strict=False)
        ]
        if phases:
            name, begin = phases[-1]
            is_end = name == "ready"
            done.append(StartPhase(name, 0.0 if is_end else now - begin, is_done=is_end))
        return Heartbeat(
            instance=instance,
            phases=tuple(done),
            is_ready=self._is_ready,
            is_draining=self.is_draining,
            capacity=self.capacity,
            step_seconds=None if started is None else now - started,
            slowest_step_seconds=self._slowest,
            stats=self.stats,
            state_version=self.sleep_state[0],
            sleep_level=self.sleep_state[1],
        )


class HeartbeatThread:
    """Publishes a reading of `progress` every `interval_s`, whatever the other threads do."""

    def __init__(
        self, directory: Path, instance: int, progress: Progress, interval_s: float
    ) -> None:
        self._address = heartbeat_address(directory)
        self._instance = instance
        self._progress = progress
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.PUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 8)  # an old beat tells nothing
            socket.bind(self._address)
            while not self._stop.is_set():
                faulthandler.dump_traceback_later(STUCK_INTERPRETER_S, exit=True)
                socket.send(encode(self._progress.reading(self._instance)))
                self._stop.wait(self._interval_s)
            faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


async def heartbeats(
    context: zmq.asyncio.Context, directory: Path, silence_s: float
) -> AsyncIterator[Heartbeat | None]:
    """The beats of whichever core runs in this directory, and None after each `silence_s` without
    one. Endless."""
    codec: Codec[Heartbeat] = Codec(Heartbeat)
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RCVHWM, 64)
        socket.subscribe(b"")
        socket.connect(heartbeat_address(directory))
        while True:
            data: bytes | None = None
            # Not `wait_for`: before Python 3.12 it forgets a cancellation that comes with the data.
            try:
                async with asyncio.timeout(silence_s):
                    data = await socket.recv()
            except TimeoutError:  # a reader that slept itself has what came meanwhile
                with contextlib.suppress(zmq.Again):
                    data = await socket.recv(zmq.NOBLOCK)
            if data is None:
                yield None
                continue
            try:
                yield codec.decode(data)
            except GarbledMessageError as error:
                logger.warning("a heartbeat could not be read: %s", error)
    finally:
        socket.close()
