"""Keeps one engine core process running: starts it, watches it, replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq.asyncio

from quire.base.errors import ConfigError, EngineError
from quire.base.telemetry.flight.dump import DumpFolder, collect
from quire.base.telemetry.flight.record import RING_PREFIX
from quire.base.telemetry.flight.stacks import StackPlace, forget_stacks
from quire.engine.core.heartbeat import heartbeats
from quire.engine.core.launch import read_failure, was_ready
from quire.engine.supervision.stall import StallLimits, StallWatch
from quire.protocol.codec import launch_bytes
from quire.protocol.messages import PROTOCOL_VERSION, Launch

__all__ = ["CORE_COMMAND", "EngineSupervisor", "RestartPolicy", "SettingValue"]

logger = logging.getLogger("quire")

SettingValue = str | int | float | bool | None

CORE_COMMAND = (sys.executable, "-m", "quire.engine.supervision.core_process")
STOP_TIMEOUT_S = 10.0
WATCH_AGAIN_S = 0.5
CORE_FILES = ("ready-", "failure-", "partial-", "in-flight-", RING_PREFIX)
"""Files that a core leaves in the directory, each with its number: see `launch`, `in_flight` and
`telemetry.flight`."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The first restart within `window_s` is at once, each further one waits twice as long as the
    one before, from `first_delay_s` to `max_delay_s`. After `max_failed_starts` cores in a row
    that did not become ready, no other one is started."""

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    window_s: float = 120.0
    max_failed_starts: int = 4

    def delay(self, recent_restarts: int) -> float:
        """Seconds to wait, after so many restarts within the window."""
        if recent_restarts == 0:
            return 0.0
        return min(self.first_delay_s * 2.0 ** min(recent_restarts - 1, 30), self.max_delay_s)


class EngineSupervisor:
    """One core at a time, in the given directory, where clients find it.

    settings: values by name in `EngineSettings`. command: command that runs a core. on_dead: called
    once, with the reason, when no core will come any more. Use it within one event loop: `run`
    until it ends, or `stop`.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, SettingValue],
        *,
        on_dead: Callable[[str], None],
        flight_dir: Path,
        command: Sequence[str] = CORE_COMMAND,
        heartbeat_interval_s: float = 0.25,
        max_message_bytes: int = 64 * 2**20,
        stall_limits: StallLimits | None = None,
        restart_policy: RestartPolicy | None = None,
        free_bytes: int | None = None,
        replica: int = 0,
    ) -> None:
        """free_bytes, replica, flight_dir: see `Launch`."""
        self._dumps = DumpFolder(flight_dir)
        self._free_bytes = free_bytes
        self._replica = replica
        self._directory = directory
        self._settings = dict(settings)
        self._on_dead = on_dead
        self._command = tuple(command)
        self._heartbeat_interval_s = heartbeat_interval_s
        self._max_message_bytes = max_message_bytes
        self._limits = stall_limits or StallLimits()
        self._policy = restart_policy or RestartPolicy()
        self._process: asyncio.subprocess.Process | None = None
        self._instance = -1
        self._was_ready = False  # the present core, by its heartbeats: files may be tidied away
        self._hang: str | None = None
        self._was_ever_ready = False
        self._num_failed_starts = 0
        self._restarts = deque[float]()
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """Process id of the present core."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep a core running until `stop`. Ends early, after `on_dead`, when that is hopeless.

        Raises ConfigError if the first core cannot start with these settings.
        """
        while not self._is_stopping:
            try:
                process = await self._spawn()
            except OSError as error:
                self._on_dead(f"the engine core cannot be started: {error}")
                raise EngineError(f"cannot run {self._command}: {error}") from error
            status = await self._follow(process)
            if self._is_stopping:
                return
            if self._hang is None and self._has_served:
                await self._write_dump(f"fault: the engine core ended ({_describe(status)})")
            self._after_end(status)
            delay = self._delay()
            if delay:
                logger.warning("the next engine core starts in %.1f s", delay)
            await asyncio.sleep(delay)

    async def stop(self) -> None:
        """End the core, and with it `run`. Its present step is waited for, but not forever."""
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None, "spawned with a pipe"
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            logger.warning("the engine core did not end in %g s and is killed", STOP_TIMEOUT_S)
            _kill(process)
            await process.wait()

    # --- one core -------------------------------------------------------------------------------

    async def _spawn(self) -> asyncio.subprocess.Process:
        self._instance += 1
        self._was_ready, self._hang = False, None
        self._remove_files_of(self._instance - 2)  # clients may still read those of the last one
        process = self._process = await self._start_process()
        launch = launch_bytes(
            Launch(
                version=PROTOCOL_VERSION,
                instance=self._instance,
                directory=str(self._directory),
                parent_pid=os.getpid(),
                heartbeat_interval_s=self._heartbeat_interval_s,
                max_message_bytes=self._max_message_bytes,
                settings=self._settings,
                free_bytes=self._free_bytes,
                replica=self._replica,
                flight_dir=str(self._dumps.path),
            )
        )
        assert process.stdin is not None, "spawned with a pipe"
        process.stdin.write(launch)
        with contextlib.suppress(ConnectionError):  # it died already; its end is seen next
            await process.stdin.drain()
        return process

    async def _start_process(self) -> asyncio.subprocess.Process:
        """Start what reads a `Launch` from its standard input and runs a core."""
        return await asyncio.create_subprocess_exec(*self._command, stdin=asyncio.subprocess.PIPE)

    async def _follow(self, process: asyncio.subprocess.Process) -> int:
        """Watch a core until its end; its exit status."""
        watch = StallWatch(self._limits, time.monotonic())
        watching = asyncio.ensure_future(self._watch(process, watch))
        try:
            status = await process.wait()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            if process.returncode is None:
                _kill(process)
                await process.wait()
        return status

    async def _watch(self, process: asyncio.subprocess.Process, watch: StallWatch) -> None:
        """End the core if it hangs. What goes wrong in here is logged and must not leave the core
        unwatched, nor end the supervision of those that follow it."""
        while True:
            try:
                await self._end_if_hung(process, watch)
                return
            except Exception:
                logger.exception("watching the engine core failed; it begins again")
                await asyncio.sleep(WATCH_AGAIN_S)

    async def _end_if_hung(self, process: asyncio.subprocess.Process, watch: StallWatch) -> None:
        context = zmq.asyncio.Context()
        interval = max(self._heartbeat_interval_s, 0.05)
        try:
            async for beat in heartbeats(context, self._directory, interval):
                now = time.monotonic()
                if beat is not None and beat.instance == self._instance:
                    watch.observe(beat, now)
                    self._was_ready |= beat.is_ready
                self._hang = watch.hang(now)
                if self._hang is not None:
                    logger.error("the engine core (process %d) hangs: %s", process.pid, self._hang)
                    await self._end_hung(process)
                    return
        finally:
            context.destroy(linger=0)

    async def _end_hung(self, process: asyncio.subprocess.Process) -> None:
        try:
            await self._write_dump(f"stall: {self._hang}")
        finally:
            _kill(process)

    async def _write_dump(self, reason: str) -> None:
        """Write what the core has done of late, and log the stacks of its processes."""
        try:
            dump = await asyncio.to_thread(collect, reason, "server", [self._directory])
            for each in dump.stacks[1:]:
                logger.error("stacks of the %s (process %d):\n%s", each.name, each.pid, each.text)
            await asyncio.to_thread(self._dumps.write, dump)
        except Exception:  # the next core matters more
            logger.exception("the flight recorder's dump could not be made")

    # --- what follows ---------------------------------------------------------------------------

    def _after_end(self, status: int) -> None:
        """Raises if no other core shall be started."""
        failure = read_failure(self._directory, self._instance)
        reason = failure.message if failure is not None else self._describe(status)
        if self._has_served:
            self._was_ever_ready = True
            self._num_failed_starts = 0
            logger.error("the engine core ended (%s)", reason)
            return
        self._num_failed_starts += 1
        is_config = failure is not None and failure.is_config
        if is_config and not self._was_ever_ready:
            self._on_dead(reason)
            raise ConfigError(reason)  # whoever started it shows the reason
        logger.error("the engine core did not start: %s", reason)
        if not self._was_ever_ready or self._num_failed_starts >= self._policy.max_failed_starts:
            self._on_dead(f"the engine cannot be started: {reason}")
            raise EngineError(f"the engine core cannot be started: {reason}")

    @property
    def _has_served(self) -> bool:
        return self._was_ready or was_ready(self._directory, self._instance)

    def _describe(self, status: int) -> str:
        end = _describe(status)
        return end if self._hang is None else f"{end}, since {self._hang}"

    def _delay(self) -> float:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._policy.window_s:
            self._restarts.popleft()
        delay = self._policy.delay(len(self._restarts))
        self._restarts.append(now)
        return delay

    def _remove_files_of(self, instance: int) -> None:
        for prefix in CORE_FILES:  # others keep numbered files in the directory as well
            (self._directory / f"{prefix}{instance}").unlink(missing_ok=True)
        forget_stacks(StackPlace(str(self._directory), f"core{instance}"))


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _describe(status: int) -> str:
    """An exit status as asyncio gives it, in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
