"""The engine core as a process, started by a supervisor:

    python -m quire.engine.supervision.core_process

What it shall do comes on its standard input as a `Launch`. That pipe stays open while the parent
lives: when it closes, this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.platform.streams import claim_streams
from quire.base.telemetry.flight.dump import DumpFolder, FaultDumps, collect
from quire.base.telemetry.flight.record import FlightRecorder, ring_in
from quire.base.telemetry.flight.stacks import StackFile, StackPlace
from quire.config.settings import EngineSettings
from quire.engine.core.engine_core import EngineCore, PlanObserver
from quire.engine.core.heartbeat import HeartbeatThread, Progress
from quire.engine.core.in_flight import InFlightRecord
from quire.engine.core.launch import (
    mark_ready,
    note_rest,
    read_launch,
    read_rest,
    read_weights,
    write_failure,
)
from quire.engine.core.loop import CoreLoop
from quire.engine.core.socket import CoreSocket
from quire.protocol.messages import Launch, StartFailure, Welcome
from quire.protocol.status import EngineCapacity

__all__ = ["BuildCore", "StartedCore", "run_core_process"]

logger = logging.getLogger("quire")

PR_SET_PDEATHSIG = 1
STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class StartedCore:
    core: EngineCore
    capacity: EngineCapacity


BuildCore = Callable[[Launch, Progress, PlanObserver, FlightRecorder], StartedCore]


def run_core_process(build: BuildCore) -> int:
    """Read the launch, build the core, and serve until told to stop. The exit status."""
    claim_streams()
    logging.basicConfig(format=f"%(levelname)s core[{os.getpid()}] %(message)s")
    try:
        launch = read_launch(sys.stdin.fileno())
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    directory = Path(launch.directory)
    _die_with(launch.parent_pid)
    StackFile(_stack_place(launch), "core")
    # A shell or a service manager sends these to the front and to its children at once. They are
    # for the front, which drains, and needs its core to the end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    stopper = _Stopper()
    progress = Progress()
    beat = HeartbeatThread(directory, launch.instance, progress, launch.heartbeat_interval_s)
    in_flight = InFlightRecord(directory, launch.instance)
    dumps = FaultDumps(
        DumpFolder(Path(launch.flight_dir)),
        lambda reason: collect(reason, "core", [directory]),
    )
    flight = FlightRecorder(
        ring_in(directory, launch.instance), replica=launch.replica, on_fault=dumps.fault
    )
    try:
        started = build(launch, progress, in_flight.write, flight)
        for left in (read_weights(directory), read_rest(directory)):
            if left is not None:
                started.core.control(left, time.monotonic())
    except BaseException as error:  # also what a model of others raises
        is_config = isinstance(error, ConfigError)
        if not is_config:
            logger.exception("the engine core cannot start")
        reason = str(error) if is_config else f"{type(error).__name__}: {error}"
        write_failure(directory, launch.instance, StartFailure(is_config, reason))
        return 1
    socket = CoreSocket(directory, stopper.wakeup_fd)
    loop = CoreLoop(
        started.core,
        socket,
        progress,
        in_flight,
        welcome=Welcome(launch.instance, started.capacity),
        max_message_bytes=launch.max_message_bytes,
        note_rest=partial(note_rest, directory),
    )
    stopper.watch(loop)
    gc.freeze()  # what start-up made lives as long as the process: collections need not visit it
    mark_ready(directory, launch.instance)
    progress.ready(started.capacity)
    try:
        loop.run()
    finally:
        socket.close()
        started.core.shutdown()
        beat.stop()
    return 0


class _Stopper:
    """Ends the loop when the parent closes the pipe, or at SIGUSR2: the first one lets the loop
    finish what it has, so that a fresh core takes over; the second does not."""

    def __init__(self) -> None:
        self.wakeup_fd, self._signal_fd = os.pipe()
        os.set_blocking(self.wakeup_fd, False)
        os.set_blocking(self._signal_fd, False)
        self._loop: CoreLoop | None = None
        thread = threading.Thread(target=self._await_end_of_input, name="quire-parent", daemon=True)
        thread.start()

    def watch(self, loop: CoreLoop) -> None:
        self._loop = loop
        signal.set_wakeup_fd(self._signal_fd)
        signal.signal(signal.SIGUSR2, self._on_sigusr2)

    def _on_sigusr2(self, number: int, frame: object) -> None:
        del number, frame
        assert self._loop is not None, "installed with the loop"
        signal.signal(signal.SIGUSR2, self._on_second_sigusr2)
        self._loop.drain()

    def _on_second_sigusr2(self, number: int, frame: object) -> None:
        del number, frame
        self._stop()

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.stop()

    def _await_end_of_input(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        self._stop()
        with contextlib.suppress(OSError):
            os.write(self._signal_fd, b"\0")
        if self._loop is not None:
            threading.Event().wait(STOP_GRACE_S)  # the loop ends after its present step
        os._exit(1)


def _die_with(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies, even if it is hung (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before the line above


def _stack_place(launch: Launch) -> StackPlace:
    return StackPlace(launch.directory, f"core{launch.instance}")


def _build(
    launch: Launch, progress: Progress, on_plan: PlanObserver, flight: FlightRecorder
) -> StartedCore:
    """The real core. Imports torch, on first use."""
    from quire.engine.build import build_core

    settings = EngineSettings.from_values(launch.settings)
    built = build_core(
        settings,
        progress.enter,
        on_plan,
        partial(_end_without, flight),
        launch.free_bytes,
        launch.replica,
        flight=flight,
        stacks=_stack_place(launch),
    )
    chosen = built.resolved.settings
    return StartedCore(
        built.core,
        EngineCapacity(
            max_model_len=chosen.max_model_len,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            block_size=chosen.block_size,
            num_blocks=chosen.num_kv_blocks,
            capacity_tokens=built.resolved.memory.capacity_tokens,
            groups=tuple(
                (group.window, group.tokens_per_block) for group in built.resolved.layout.groups
            ),
            uses_priority=built.core.uses_priority,
            description=built.report.kernels,
            draws_tokens=built.resolved.spec.draws_tokens,
            num_classes=built.resolved.spec.num_classes,
            device=chosen.device,
            kv_store=built.kv_store,
            facts=built.facts,
            num_ranks=chosen.tensor_parallel_size,
        ),
    )


def _end_without(flight: FlightRecorder, reason: str) -> None:
    """Write a dump and exit, because a rank of the model is lost, so that the next core takes over
    all requests. Whoever noticed has logged it."""
    try:
        flight.fault(reason)
    finally:
        os._exit(1)


def main() -> int:
    return run_core_process(_build)


if __name__ == "__main__":
    sys.exit(main())
