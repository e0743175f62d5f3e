"""Signals to a server, and its end by them or because a part of it ended."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from quire.base.errors import EngineError

__all__ = ["StopSignals", "until"]

logger = logging.getLogger("quire.server")


class StopSignals:
    """SIGINT and SIGTERM: the first one asks to drain, the second one to end at once. SIGUSR1 asks
    for a dump of the flight recorder."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._on_first: list[Callable[[], None]] = []
        self._dump: Callable[[str], None] = _no_dump

    def install(self) -> None:
        """Handle signals in the running event loop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        # Not a handler of the loop: this one also runs while the loop is stuck.
        signal.signal(signal.SIGUSR1, self._on_usr1)

    def call_at_usr1(self, dump: Callable[[str], None]) -> None:
        """Call `dump` with the reason, in a thread of its own, whenever SIGUSR1 comes."""
        self._dump = dump

    def _on_usr1(self, number: int, frame: object) -> None:
        del number, frame
        threading.Thread(
            target=self._dump, args=("signal: SIGUSR1",), name="quire-flight", daemon=True
        ).start()

    def call_at_first(self, action: Callable[[], None]) -> None:
        """Call `action` when the first signal comes, before anything else; now if it has come."""
        if self.first.is_set():
            action()
        else:
            self._on_first.append(action)

    def _on_signal(self) -> None:
        if self.first.is_set():
            self.second.set()
        else:
            for action in self._on_first:
                action()
        self.first.set()


def _no_dump(reason: str) -> None:
    logger.warning("%s asks for a dump, but there is no engine yet: ask again", reason)


async def until(event: asyncio.Event, tasks: Mapping[asyncio.Task[Any], str]) -> None:
    """Wait until `event` is set. Raises a task's exception, and EngineError with a task's text if
    that task ends."""
    stopping = asyncio.create_task(event.wait())
    waited: set[asyncio.Task[Any]] = {stopping, *tasks}
    try:
        while not stopping.done():
            done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                return
            for task in done:
                task.result()
                if tasks[task]:
                    raise EngineError(tasks[task])
    finally:
        stopping.cancel()
