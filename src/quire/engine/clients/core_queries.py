"""Queries of a client to its core, beside requests: one answer each, or none if the core dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from quire.base.errors import EngineUnavailableError

__all__ = ["CoreQueries"]


class CoreQueries:
    """Questions that wait for their answers. For one event loop."""

    def __init__(self) -> None:
        self._next_number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, send: Callable[[int], object]) -> Any:
        """Send a question under the number that `send` is given, and wait for the answer.
        Raises EngineUnavailableError if it cannot come any more."""
        number, self._next_number = self._next_number, self._next_number + 1
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            send(number)
            return await answer
        finally:
            del self._waiting[number]

    def answer(self, number: int, found: object) -> None:
        """Deliver the core's answer; drop it if nothing waits for it."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(found)

    def fail_all(self, message: str) -> None:
        """Fail the waiting questions: the core will not answer."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailableError(message))
