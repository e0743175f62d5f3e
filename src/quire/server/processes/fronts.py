"""Several front processes on one port, as supervised by their owner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from quire.base.errors import ConfigError, EngineError
from quire.base.telemetry.flight.stacks import StackPlace, forget_stacks
from quire.engine.supervision.supervisor import RestartPolicy, SettingValue
from quire.server.processes.front_launch import BAD_CONFIG, FrontLaunch
from quire.server.processes.watched_front import WatchedFront
from quire.server.readings.front_board import FrontBoard
from quire.server.settings import ServerSettings

__all__ = ["Fronts"]

logger = logging.getLogger("quire.server")

LAST_S = 10.0
"""Seconds for a front to end after it was told to."""
BEATS = 8
"""Heartbeats within the time after which a front counts as hung."""
STEADY_S = 60.0
"""Seconds of life after which a front is replaced at once when it ends."""


class Fronts:
    """`api_server_count` processes. A process that dies is replaced; the core frees its open
    requests.

    A new process has a new number, since handles in the core are never reused.
    """

    def __init__(
        self,
        directory: Path,
        listeners: Sequence[socket.socket],
        engine: Mapping[str, SettingValue],
        server: ServerSettings,
        policy: RestartPolicy | None = None,
        on_listening: Callable[[socket.socket], None] = lambda _: None,
        hang_limit_s: float = 30.0,
    ) -> None:
        """directory: directory of the engine core. listeners: one for each process. on_listening:
        called when a process takes connections from its listener. hang_limit_s: time after which a
        process with a stuck event loop is replaced."""
        self.board = FrontBoard(directory)
        self._directory = directory
        self._listeners = listeners
        self._engine = dict(engine)
        self._server = server
        self._policy = policy or RestartPolicy()
        self._on_listening = on_listening
        self._hang_limit_s = hang_limit_s
        self._next_number = 1  # 0 is the owner's own client
        self._fronts: dict[int, WatchedFront] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        """Set once no more processes may start."""
        self._is_stopped = False
        """True once a front that is being started gets no time to end by itself."""

    async def run(self) -> None:
        """Keep the processes running until `stop` has ended them all.

        Raises ConfigError if one cannot start with these settings, and EngineError if one fails
        again and again.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._keepers = [group.create_task(self._keep(x)) for x in self._listeners]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def wait_until_ready(self) -> None:
        """Wait until each process can serve: it has its part of the model, and knows that the
        engine runs."""
        while len(self._fronts) < len(self._listeners) or not all(
            map(self.board.has, self._fronts)
        ):
            await asyncio.sleep(0.02)

    def drain(self) -> None:
        """Tell them to refuse new requests, and to end when open ones have, within
        `shutdown_timeout`."""
        self._stopping.set()
        for front in self._fronts.values():
            front.drain()

    async def stop(self) -> None:
        """End them now; open requests fail, with a message. Returns when all have ended."""
        self._stopping.set()
        self._is_stopped = True
        for front in self._fronts.values():
            front.end()
        if not self._keepers:
            return
        _, late = await asyncio.wait(self._keepers, timeout=LAST_S)
        if late:
            logger.warning("%d front processes did not end and are killed", len(late))
            for keeper in late:
                keeper.cancel()
            await asyncio.wait(late)

    async def _keep(self, listener: socket.socket) -> None:
        """Keep one process at a time running on one socket."""
        num_early_ends = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            number, status = await self._run_one(listener)
            if self._stopping.is_set():
                return
            if status == BAD_CONFIG:
                raise ConfigError("A front process cannot start. The log above says why.")
            lived_s = time.monotonic() - started
            num_early_ends = 0 if lived_s > STEADY_S else num_early_ends + 1
            if num_early_ends > self._policy.max_failed_starts:
                raise EngineError("Front processes end again and again. The log above says why.")
            logger.error("front process %d ended (status %d) and is replaced", number, status)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._policy.delay(max(0, num_early_ends - 1))):
                    await self._stopping.wait()

    async def _run_one(self, listener: socket.socket) -> tuple[int, int]:
        """Run a process from start to end, and return its number and exit status. It ends with this
        call, even if that is cancelled."""
        number, self._next_number = self._next_number, self._next_number + 1
        front = await WatchedFront.spawn(listener.fileno())
        self._fronts[number] = front
        following = asyncio.create_task(self._follow(front, number, listener))
        try:
            await self._launch(front, number, listener)
            status = await front.wait()
        finally:
            following.cancel()
            await front.kill()
            del self._fronts[number]
            self._retire(number)
        return number, status

    async def _launch(self, front: WatchedFront, number: int, listener: socket.socket) -> None:
        if self._is_stopped:  # since the spawn began, so `stop` did not reach it
            await front.kill()
            return
        await front.launch(
            FrontLaunch(
                front=number,
                listener=listener.fileno(),
                directory=str(self._directory),
                engine=self._engine,
                server=self._server,
                heartbeat_s=min(1.0, self._hang_limit_s / BEATS),
            )
        )
        if self._stopping.is_set():  # likewise for `drain`
            front.drain()

    async def _follow(self, front: WatchedFront, number: int, listener: socket.socket) -> None:
        """Wait until it listens, and end it if it hangs."""
        if await front.watch(self._hang_limit_s, partial(self._on_listening, listener)):
            logger.error("front process %d hangs and is killed", number)
            await front.kill()

    def _retire(self, number: int) -> None:
        forget_stacks(StackPlace(str(self._directory), f"front{number}"))
        try:
            self.board.retire(number)
        except OSError:
            logger.exception("the last reading of front process %d stays as it was", number)
