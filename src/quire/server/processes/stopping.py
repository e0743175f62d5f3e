"""The end of a server, by signals or because a part of it ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import EngineError

__all__ = ["StopSignals", "until"]


class StopSignals:
    """SIGINT and SIGTERM: the first one asks to drain, the second one to end at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._on_first: list[Callable[[], None]] = []

    def install(self) -> None:
        """Handle signals in the running event loop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

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
