"""One front process, as its owner sees it: the pipes that lead to it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from quire.engine.launch import launch_bytes
from quire.server.front_launch import FrontLaunch

__all__ = ["FRONT_COMMAND", "WatchedFront"]

FRONT_COMMAND = (sys.executable, "-m", "quire.server.front_process")


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
        """Tell it what to do."""
        self._stdin.write(launch_bytes(launch))
        with contextlib.suppress(ConnectionError):  # it died already; its end is seen next
            await self._stdin.drain()

    async def wait_until_listening(self) -> bool:
        """Whether it takes connections now; False if it has ended before."""
        return bool(await self._stdout.read(1))

    def drain(self) -> None:
        """Let it refuse new requests, and end when open ones have."""
        # RuntimeError: the pipe of one that died is closed (uvloop).
        with contextlib.suppress(OSError, RuntimeError):
            self._stdin.write(b"d")

    def end(self) -> None:
        """Let it end now: open requests fail, with a message."""
        self._stdin.close()

    async def wait(self) -> int:
        """Until it has ended; its exit status."""
        return await self._process.wait()

    async def kill(self) -> None:
        """Until it has ended, whatever it does."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
