"""Passes tokens from the engine's client to a response, in one call per step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire.engine.clients.async_client import RequestUpdate, UpdateStream

__all__ = ["NeverFull", "Outlet", "follow"]


class Outlet(Protocol):
    """Destination of a stream's output."""

    @property
    def is_full(self) -> bool: ...

    async def flush(self) -> None:
        """Send what was written, and wait for room."""
        ...


class NeverFull:
    """An outlet for answers that are collected, not streamed."""

    is_full = False

    async def flush(self) -> None:
        return


async def follow(
    stream: UpdateStream, take: Callable[[RequestUpdate], None], outlet: Outlet
) -> None:
    """Give every update to `take` until the stream is over. Raises what `take` raises.

    `take` runs within the call that brings the update, so hundreds of streams that get a token each
    cost no task switches. Only while `outlet` is full does this task wait for it; updates then wait
    in the stream, and merge.
    """
    await _Follower(stream, take, outlet).run()


class _Follower:
    def __init__(
        self, stream: UpdateStream, take: Callable[[RequestUpdate], None], outlet: Outlet
    ) -> None:
        self._stream = stream
        self._take = take
        self._outlet = outlet
        self._is_taking = False
        self._error: Exception | None = None
        self._halted = asyncio.Event()

    async def run(self) -> None:
        stream = self._stream
        stream.listen(self._on_news)
        try:
            while True:
                await self._outlet.flush()
                self._halted.clear()
                has_taken = self._take_news()
                if self._error is not None:
                    raise self._error
                if has_taken:
                    continue
                if stream.is_over:
                    return
                await self._halted.wait()
        finally:
            stream.listen(None)

    def _on_news(self) -> None:
        """Take the updates; wake the task for work that needs it."""
        if self._outlet.is_full:
            self._halted.set()
            return
        self._take_news()
        if self._error is not None or self._stream.is_over or self._outlet.is_full:
            self._halted.set()

    def _take_news(self) -> bool:
        """Take the updates. Returns True if there were any."""
        has_taken = False
        if self._is_taking or self._error is not None:
            return (
                has_taken  # `take` has ended a sample: the loop that called it continues with that
            )
        self._is_taking = True
        try:
            while (update := self._stream.take_update()) is not None:
                has_taken = True
                self._take(update)
        except Exception as error:  # noqa: BLE001  raised by `run`
            self._error = error
        self._is_taking = False
        return has_taken
