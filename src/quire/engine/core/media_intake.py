"""Media on their way into a core: encoded beside steps, with the requests that wait for them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import PriorityQueue
from types import TracebackType

from quire.base.errors import QuireError
from quire.engine.core.client_table import ConnectedClient
from quire.engine.core.engine_core import EngineCore
from quire.protocol.media import ImageTiles, MediaInfo
from quire.protocol.messages import PutMedia
from quire.protocol.request import EngineRequest

__all__ = ["EndedMedia", "MediaIntake"]

logger = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class EndedMedia:
    """Media that the worker has, or has refused. info: None if refused, and `reason` says why."""

    handle: int
    query: int
    info: MediaInfo | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Held:
    client: ConnectedClient
    request: EngineRequest
    media: frozenset[int]

    @property
    def handles(self) -> range:
        first = self.request.first_handle + self.request.first_sample
        return range(first, first + self.request.params.n)


@dataclass(order=True, slots=True)
class _Job:
    """Work for the thread, in the order in which it is done. work: None to end the thread."""

    is_spare: bool
    number: int
    work: Callable[[], MediaInfo] | None = field(default=None, compare=False)
    future: Future[MediaInfo] = field(default_factory=Future[MediaInfo], compare=False)


class _Encoder:
    """A thread that waits for the worker to encode, and starts with the first image. Images of
    spare requests wait until there are no others."""

    def __init__(self) -> None:
        self._jobs = PriorityQueue[_Job]()
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], MediaInfo], *, is_spare: bool) -> Future[MediaInfo]:
        job = _Job(is_spare, next(self._numbers), work)
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-images")
            self._thread.start()
        return job.future

    def close(self) -> None:
        """End the thread, after the image that it encodes; the others are cancelled."""
        if self._thread is not None:
            self._jobs.put(_Job(is_spare=False, number=-1))
            self._thread.join()
        while not self._jobs.empty():
            self._jobs.get().future.cancel()

    def _run(self) -> None:
        while (job := self._jobs.get()).work is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.future.set_result(job.work())
            except BaseException as error:  # noqa: BLE001  it is raised where the result is read
                job.future.set_exception(error)


class MediaIntake:
    """Puts media into the worker: embeddings at once, images in a thread of their own, one after
    the other, and those of spare requests last. The loop's thread calls all methods."""

    def __init__(self, core: EngineCore, wake: Callable[[], None]) -> None:
        """wake: tells the loop, from another thread, that something has ended."""
        self._core, self._wake = core, wake
        self._encoder = _Encoder()
        self._ended: list[EndedMedia] = []
        self._encoding: dict[Future[MediaInfo], PutMedia] = {}
        self._held: list[_Held] = []

    def __enter__(self) -> None:
        """The encoder's thread starts with the first image."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the thread, after the image that it encodes."""
        self._encoder.close()

    @property
    def is_busy(self) -> bool:
        """True while media or requests have not ended here."""
        return bool(self._encoding or self._ended or self._held)

    def put(self, client: ConnectedClient, message: PutMedia) -> None:
        """Begin to put media; `take_ended` tells what became of them."""
        client.coming.add(message.handle)
        if isinstance(message.data, ImageTiles):
            work = partial(self._core.put_media, message.handle, message.data)
            future = self._encoder.submit(work, is_spare=message.is_spare)
            self._encoding[future] = message
            future.add_done_callback(lambda _: self._wake())
            return
        future = Future[MediaInfo]()
        try:
            future.set_result(self._core.put_media(message.handle, message.data))
        except Exception as error:  # noqa: BLE001  as of the encoder's thread
            future.set_exception(error)
        self._ended.append(_ending(message, future))

    def take_ended(self) -> list[EndedMedia]:
        """Return what has ended since the last call."""
        ended, self._ended = self._ended, []
        for future in [each for each in self._encoding if each.done()]:
            message = self._encoding.pop(future)
            if not future.cancelled():
                ended.append(_ending(message, future))
        return ended

    def cancel(self, client: ConnectedClient, handles: Iterable[int]) -> None:
        """Forget media of a client that have not ended. An image that is being encoded ends, and
        those behind it are not begun."""
        gone = client.coming.intersection(handles)
        client.coming -= gone
        for future, message in self._encoding.items():
            if message.handle in gone:
                future.cancel()

    def hold(self, client: ConnectedClient, request: EngineRequest, media: Iterable[int]) -> bool:
        """Keep a request until its media have ended. Returns False if there is nothing to wait
        for."""
        coming = client.coming.intersection(media)
        if coming:
            self._held.append(_Held(client, request, frozenset(coming)))
        return bool(coming)

    def take_held(self) -> Iterator[tuple[ConnectedClient, EngineRequest]]:
        """Yield the requests that need wait no longer."""
        held, self._held = self._held, []
        for each in held:
            if each.client.coming.isdisjoint(each.media):
                yield each.client, each.request
            else:
                self._held.append(each)

    def let_go(self, handles: Iterable[int]) -> list[int]:
        """Forget held requests that have one of these handles. Return all handles of those."""
        wanted = set(handles)
        gone = [each for each in self._held if not wanted.isdisjoint(each.handles)]
        self._held = [each for each in self._held if wanted.isdisjoint(each.handles)]
        return [handle for each in gone for handle in each.handles]


def _ending(message: PutMedia, future: Future[MediaInfo]) -> EndedMedia:
    error = future.exception()
    if error is None:
        return EndedMedia(message.handle, message.query, future.result())
    if isinstance(error, QuireError):
        return EndedMedia(message.handle, message.query, None, str(error))
    logger.error("media %d cannot be taken", message.handle, exc_info=error)
    return EndedMedia(
        message.handle, message.query, None, f"the engine cannot take them ({error!r})"
    )
