"""One front process, as seen by its owner: its pipes, its heartbeat and its end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable

from quire.protocol.codec import launch_bytes
from quire.server.processes.front_launch import FrontLaunch

__all__ = ["FRONT_COMMAND", "WatchedFront"]

FRONT_COMMAND = (sys.executable, "-m", "quire.server.processes.front_process")
START_S = 120.0
"""Seconds after which a front that does not listen counts as hung."""


class WatchedFront:
    """A process that has been spawned, and not yet told what to do."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "spawned with pipes"
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    async def spawn(cls, listener: int) -> WatchedFront:
        """listener: descriptor that the process inherits."""
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                *FRONT_COMMAND, stdin=pipe, stdout=pipe, pass_fds=(listener,)
            )
        )

    async def launch(self, launch: FrontLaunch) -> None:
        """Send the launch message."""
        self._stdin.write(launch_bytes(launch))
        with contextlib.suppress(ConnectionError):  # it died already; its end is seen next
            await self._stdin.drain()

    async def watch(self, hang_limit_s: float, on_listening: Callable[[], None]) -> bool:
        """Wait until the front has ended (returns False), or was silent for the limit (returns
        True). on_listening: called when it takes connections."""
        heard = await self._hear(START_S)
        if heard:
            on_listening()
        while heard:
            heard = await self._hear(hang_limit_s)
        return heard is None

    async def _hear(self, limit_s: float) -> bytes | None:
        """Read the front's output: empty when it has ended, None if nothing arrives within the
        limit.

        The wait is in halves: the first half may have passed while this process itself was
        suspended, with unread heartbeats.
        """
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s / 2):
                    return await self._stdout.read(4096)
        return None

    def drain(self) -> None:
        """Tell it to refuse new requests, and to end when open ones have."""
        # RuntimeError: the pipe of a dead process is closed (uvloop).
        with contextlib.suppress(OSError, RuntimeError):
            self._stdin.write(b"d")

    def end(self) -> None:
        """Tell it to end now; open requests fail, with a message."""
        self._stdin.close()

    async def wait(self) -> int:
        """Wait until the front has ended. Returns its exit status."""
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill the front and wait for its end."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
