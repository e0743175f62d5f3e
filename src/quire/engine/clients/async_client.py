"""The door through which a server uses an engine that runs in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from quire.base.telemetry import EngineStats
from quire.protocol.control import AdminOp, Report
from quire.protocol.media import ImageData, MediaInfo
from quire.protocol.outputs import WeightHistory
from quire.protocol.request import EngineRequest, SequenceFinish
from quire.protocol.status import EngineStatus
from quire.protocol.step import FloatArray, IntArray, PromptLogprobs, TokenLogprobs

__all__ = [
    "AsyncEngineClient",
    "RequestUpdate",
    "SampleUpdate",
    "UpdateStream",
]


class SampleUpdate(msgspec.Struct, gc=False):
    """Updates of one sample since the last read. logprobs: one per token id, if asked for. finish:
    the way the sample ended; it comes once, with its last token or after it."""

    index: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: SequenceFinish | None = None


class RequestUpdate(msgspec.Struct, gc=False):
    """Updates of one request since the last read. samples: the samples with updates, by index.
    prompt_logprobs: pieces of the list; a piece may come twice. num_cached_tokens: sent once, when
    the request's first step was planned. vector: float32 [E], sent with the end of a
    request that pools."""

    samples: list[SampleUpdate]
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    num_cached_tokens: int | None = None
    vector: FloatArray | None = None


class UpdateStream(Protocol):
    """The updates of one request: `async with await client.add(request) as stream`, then either
    `async for update in stream` in one task; or `listen`, and `take_update` at every call, which
    takes no change of tasks per token.

    Every sample gets exactly one `finish`, and the iteration ends after the last of them. A sample
    that failed, or that the engine could not complete, finishes with reason ERROR and a message.
    Reading raises RequestError, before any token, if the core refuses the request, as one may that
    holds less than the one before it: then no finish comes. A slow reader gets larger updates;
    waiting updates hold at most max_tokens token ids per sample. Leaving the `async with` aborts
    samples that have not finished.
    """

    def __aiter__(self) -> AsyncIterator[RequestUpdate]: ...

    async def __anext__(self) -> RequestUpdate: ...

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Call `on_news` once per message of the core that has updates for this stream, and after
        an abort; it must not raise. It is not called for updates that came earlier: take them
        first."""
        ...

    def take_update(self) -> RequestUpdate | None:
        """Return everything since the last update, without waiting; None if there is nothing."""
        ...

    def weights(self, sample_index: int) -> WeightHistory:
        """Return the weights that computed what was given of a sample so far."""
        ...

    @property
    def is_over(self) -> bool:
        """True if every sample has finished and all updates have been taken."""
        ...

    def abort(self, sample_index: int | None = None) -> None:
        """End one sample, or all, at once, with reason ABORT; finished samples are left alone.
        After the end of all samples nothing more is computed for the request."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class AsyncEngineClient(Protocol):
    """A server's view of an engine, wherever that runs. For one event loop."""

    def reserve_handles(self, count: int) -> int:
        """Return the first of `count` consecutive handles that no request has had. A request takes
        one per sample; its `first_handle` is the first."""
        ...

    async def add(self, request: EngineRequest) -> UpdateStream:
        """Send a request to the core.

        Raises EngineUnavailableError unless the engine is READY, and RequestError if an engine of
        this capacity could never serve the request, or if it cannot be sent to another process (it
        has logits processors, or is too large).
        """
        ...

    async def put_media(
        self, handle: int, data: bytes | ImageData, *, is_spare: bool = False
    ) -> MediaInfo:
        """Give the core media that requests will name by `handle`, a reserved number. They are
        given to the next core too, until `drop_media`. is_spare: images of others are encoded
        first.

        Raises RequestError if the core cannot use them or they are too large to be sent, and
        EngineUnavailableError as `control`; nothing is kept then.
        """
        ...

    def drop_media(self, handles: Iterable[int]) -> None:
        """Take media back when every request that names them has ended; unknown ones are
        ignored."""
        ...

    def abort(self, handles: Iterable[int]) -> None:
        """End sequences; unknown or finished ones are ignored."""
        ...

    def extend(self, handle: int, token_ids: IntArray, *, is_last: bool) -> None:
        """More of the prompt of an open request, int32 [N], and perhaps its end. It is computed as
        it comes, and sent again in one piece should the core die. A request that has ended is
        ignored.

        Raises RequestError if its prompt has ended already, or becomes too large to be sent to
        another process. If the core finds the prompt too long, reading the stream raises it.
        """
        ...

    async def control(self, op: AdminOp) -> Report:
        """Have the core carry out an operation between steps.

        Raises RequestError if the core refuses it, EngineUnavailableError unless the engine is
        READY or SLEEPING, and if it dies before it answers. A prefix that a request pinned stays
        when its client goes, and ends with the core, or when that sleeps.
        """
        ...

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories of the cores, with the files that they leave to whoever watches them;
        empty if the core is in this process."""
        ...

    @property
    def status(self) -> EngineStatus: ...

    @property
    def stats(self) -> EngineStats:
        """The latest reading of the core, at most a heartbeat old; zeros before the first one."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests whose streams have not ended."""
        ...

    async def wait_for_change(self, status: EngineStatus) -> EngineStatus:
        """Wait until the state, a phase or the capacity differs from what `status` says."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and wait until every stream has ended; after `timeout_s` those
        that have not fail with a message."""
        ...

    async def close(self) -> None:
        """Fail the streams that have not ended, and free everything. May be called twice."""
        ...
