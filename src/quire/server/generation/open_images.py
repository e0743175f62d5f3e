"""Media of open requests, and the memory of their images."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from quire.base.errors import RequestError
from quire.engine.clients.async_client import AsyncEngineClient
from quire.protocol.media import ImageData, MediaInfo
from quire.server.requests.errors import RefusedError
from quire.text.rendering import RenderedPrompt
from quire.text.rendering.media.images import ImageRenderer

__all__ = ["OpenImages", "PromptMedia"]


SPARE_SHARE = 2
"""Part of the bound that requests of batches share, so that others need not wait for their ends."""


_Waiting = tuple[int, int, asyncio.Future[None]]
"""Bytes, the bound of the process, and the sign that there is room."""


@dataclass(slots=True)
class _Kind:
    """Requests that are served alike. num_bytes: bytes that are in. num_held: bytes of those that
    wait."""

    num_bytes: int = 0
    num_held: int = 0
    waiting: deque[_Waiting] = field(default_factory=deque[_Waiting])


class OpenImages:
    """Bounds the bytes of images whose requests have not ended, their embeddings in the engine
    included. Requests beyond the bound wait, in the order of arrival, and hold as many bytes again
    at most. All images of a request enter at once, so that no two requests wait for each other.
    Spare requests, those of batches, enter while no other one waits, and have a part of the bound,
    also of that on requests that wait.
    For one event loop."""

    def __init__(self, num_fronts: int = 1) -> None:
        """num_fronts: processes that share the bound equally."""
        self._num_fronts = num_fronts
        self._asked, self._spare = _Kind(), _Kind()

    @property
    def num_bytes(self) -> int:
        """Bytes that are in."""
        return self._asked.num_bytes + self._spare.num_bytes

    async def enter(
        self,
        num_bytes: int,
        num_held: int,
        most: int,
        timeout_s: float,
        *,
        is_spare: bool = False,
    ) -> None:
        """Wait until there is room; `leave` gives it up. num_held: bytes of these that exist while
        they wait, those of pixels. most: bytes of all fronts. Raises RefusedError: 400 for images
        that never fit, 503 if they wait longer than the timeout, or too much waits already."""
        own = most // self._num_fronts
        if num_bytes > own:
            raise RefusedError(
                f"The images take {num_bytes:,} bytes with their embeddings, and those of all "
                f"open requests may take {own:,} (image_memory). Send fewer or smaller ones."
            )
        kind = self._kind(is_spare)
        if not (self._asked.waiting or kind.waiting) and self._fits(kind, num_bytes, own):
            kind.num_bytes += num_bytes
            return
        if not self._may_wait(kind, num_held, own):
            raise _full("The images of requests that wait take as much as image_memory.")
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        kind.waiting.append((num_bytes, own, room))
        kind.num_held += num_held
        try:
            async with asyncio.timeout(timeout_s):
                await room
        except BaseException as error:
            if room.done() and not room.cancelled():  # it got room in the same moment
                self.leave(num_bytes, is_spare=is_spare)
            else:
                kind.waiting = deque(each for each in kind.waiting if each[2] is not room)
                self._admit()
            if isinstance(error, TimeoutError):
                raise _full(
                    f"The images of other requests took all of image_memory for {timeout_s:g} s "
                    "(max_queue_s)."
                ) from error
            raise
        finally:
            kind.num_held -= num_held

    def leave(self, num_bytes: int, *, is_spare: bool = False) -> None:
        """Give up the room of a request that entered."""
        self._kind(is_spare).num_bytes -= num_bytes
        self._admit()

    def _kind(self, is_spare: bool) -> _Kind:
        return self._spare if is_spare else self._asked

    def _may_wait(self, kind: _Kind, num_held: int, own: int) -> bool:
        num_all = self._asked.num_held + self._spare.num_held
        return self._has_share(kind, kind.num_held, num_all, num_held, own)

    def _fits(self, kind: _Kind, num_bytes: int, own: int) -> bool:
        return self._has_share(kind, kind.num_bytes, self.num_bytes, num_bytes, own)

    def _has_share(self, kind: _Kind, num_own: int, num_all: int, more: int, own: int) -> bool:
        """Return whether there is room. One spare request may always have all that is free."""
        if num_all + more > own:
            return False
        is_alone = kind is self._asked or not num_own
        return is_alone or num_own + more <= own // SPARE_SHARE

    def _admit(self) -> None:
        for kind in (self._asked, self._spare):
            while kind.waiting:
                num_bytes, own, room = kind.waiting[0]
                if not self._fits(kind, num_bytes, own):
                    return
                kind.waiting.popleft()
                if not room.done():
                    kind.num_bytes += num_bytes
                    room.set_result(None)


def _full(reason: str) -> RefusedError:
    return RefusedError(f"{reason} Try again later.", status=503, retry_after_s=5)


class PromptMedia:
    """Media of one prompt, until its request ends."""

    def __init__(
        self, images: OpenImages, client: AsyncEngineClient, wait_s: float, *, is_spare: bool
    ) -> None:
        """wait_s: most seconds to wait for room. is_spare: the request is a batch's, which bounds
        how many of its own wait."""
        self._images = images
        self._client = client
        self._wait_s = wait_s
        self._is_spare = is_spare
        self._handles = range(0)
        self._num_bytes = 0

    async def enter(self, prompt: RenderedPrompt, renderer: ImageRenderer | None) -> RenderedPrompt:
        """Wait until there is room for the images of a prompt, and give its media to the engine.
        Return the prompt with them. RefusedError as `OpenImages.enter`, and with the place of a
        part that the engine refuses. `leave` follows, also if this fails."""
        if renderer is not None:
            await self._wait_for_room(prompt, renderer)
        first = self._client.reserve_handles(len(prompt.parts))
        self._handles = range(first, first + len(prompt.parts))
        infos: list[MediaInfo] = []
        for handle, part in zip(self._handles, prompt.parts, strict=True):
            data = part.data
            assert isinstance(data, bytes | ImageData), "requests bring nothing else"
            try:
                info = await self._client.put_media(handle, data, is_spare=self._is_spare)
            except RequestError as error:
                raise RefusedError(str(error), param=part.place) from error
            infos.append(info)
        return prompt.with_media(infos, self._handles)

    async def _wait_for_room(self, prompt: RenderedPrompt, renderer: ImageRenderer) -> None:
        num_bytes, num_pixels = renderer.num_bytes(prompt.parts)
        if num_bytes:
            most, num_held = renderer.bounds.max_open_bytes, 0 if self._is_spare else num_pixels
            await self._images.enter(
                num_bytes, num_held, most, self._wait_s, is_spare=self._is_spare
            )
            self._num_bytes = num_bytes

    def leave(self) -> None:
        """Take the media back, and give up their room."""
        if self._handles:
            self._client.drop_media(self._handles)
        self._images.leave(self._num_bytes, is_spare=self._is_spare)
