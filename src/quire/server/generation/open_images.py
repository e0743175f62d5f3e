"""Memory of the images of open requests."""

from __future__ import annotations

import asyncio
from collections import deque

from quire.server.requests.errors import RefusedError

__all__ = ["OpenImages"]


class OpenImages:
    """Bounds the bytes of images whose requests have not ended, their embeddings in the engine
    included. Requests beyond the bound wait, in the order of arrival, and hold as many bytes again
    at most. All images of a request enter at once, so that no two requests wait for each other. For
    one event loop."""

    def __init__(self, num_fronts: int = 1) -> None:
        """num_fronts: processes that share the bound equally."""
        self._num_fronts = num_fronts
        self._num_bytes = 0
        self._num_held = 0
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes that are in."""
        return self._num_bytes

    async def enter(self, num_bytes: int, num_held: int, most: int, timeout_s: float) -> None:
        """Wait until there is room; `leave` gives it up. num_held: bytes of these that exist while
        they wait, those of pixels. most: bytes of all fronts. Raises RefusedError: 400 for images
        that never fit, 503 if they wait longer than the timeout, or too much waits already."""
        own = most // self._num_fronts
        if num_bytes > own:
            raise RefusedError(
                f"The images take {num_bytes:,} bytes with their embeddings, and those of all "
                f"open requests may take {own:,} (image_memory). Send fewer or smaller ones."
            )
        if not self._waiting and self._num_bytes + num_bytes <= own:
            self._num_bytes += num_bytes
            return
        if self._num_held + num_held > own:
            raise _full("The images of requests that wait take as much as image_memory.")
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, own, room))
        self._num_held += num_held
        try:
            async with asyncio.timeout(timeout_s):
                await room
        except BaseException as error:
            if room.done() and not room.cancelled():  # it got room in the same moment
                self.leave(num_bytes)
            else:
                self._waiting = deque(each for each in self._waiting if each[2] is not room)
                self._admit()
            if isinstance(error, TimeoutError):
                raise _full(
                    f"The images of other requests took all of image_memory for {timeout_s:g} s "
                    "(max_queue_s)."
                ) from error
            raise
        finally:
            self._num_held -= num_held

    def leave(self, num_bytes: int) -> None:
        """Give up the room of a request that entered."""
        self._num_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, own, room = self._waiting[0]
            if self._num_bytes + num_bytes > own:
                return
            self._waiting.popleft()
            if not room.done():
                self._num_bytes += num_bytes
                room.set_result(None)


def _full(reason: str) -> RefusedError:
    return RefusedError(f"{reason} Try again later.", status=503, retry_after_s=5)
