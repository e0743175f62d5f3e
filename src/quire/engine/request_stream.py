"""The updates of one request, from the task that receives to the task that reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from quire.engine.async_client import RequestUpdate, SampleUpdate
from quire.errors import RequestError
from quire.protocol.request import EngineRequest, FinishReason, SequenceFinish
from quire.protocol.step import PromptLogprobs, TokenLogprobs

__all__ = ["RequestStream", "SampleProgress"]


@dataclass(slots=True)
class SampleProgress:
    """token_ids: all that the sample has had so far, of which the reader has taken `num_read`.
    logprobs: those not read yet. is_finish_read: the reader has had the last word."""

    token_ids: list[int] = field(default_factory=list[int])
    num_read: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish: SequenceFinish | None = None
    is_finish_read: bool = False


class RequestStream:
    """See `UpdateStream` for the reader's side. The other side is for the client, in the same event
    loop: what it gives after the end of a sample is dropped, so that each ends once.

    crashes: how many cores died while they computed this request.
    """

    def __init__(self, request: EngineRequest, on_abort: Callable[[list[int]], None]) -> None:
        """on_abort: told the indices of samples that the reader ends."""
        self.request = request
        self.samples = [SampleProgress() for _ in range(request.params.n)]
        self.crashes = 0
        self._on_abort = on_abort
        self._num_unfinished = len(self.samples)
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._num_cached_tokens: int | None = None
        self._is_cached_read = False
        self._refusal: str | None = None
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended, or the request was refused; not whether that is read."""
        return self._num_unfinished == 0

    @property
    def num_tokens(self) -> int:
        """Sampled so far, over all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    # --- what the client gives ------------------------------------------------------------------

    def take_token(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        sample = self.samples[index]
        if sample.finish is None:
            sample.token_ids.append(token_id)
            if logprobs is not None:
                sample.logprobs.append(logprobs)
            self._wake()

    def take_prompt_logprobs(self, piece: PromptLogprobs) -> None:
        if not self.is_finished:
            self._prompt_logprobs[piece.start] = piece
            self._wake()

    def take_num_cached(self, num_tokens: int) -> None:
        if self._num_cached_tokens is None and not self.is_finished:
            self._num_cached_tokens = num_tokens
            self._wake()

    def finish(self, index: int, finish: SequenceFinish) -> None:
        sample = self.samples[index]
        if sample.finish is None:
            if finish.whole is not None:
                sample.token_ids += finish.whole.token_ids.tolist()
                sample.logprobs += finish.whole.logprobs
            sample.finish = finish
            self._num_unfinished -= 1
            self._wake()

    def finish_all(self, reason: FinishReason, message: str = "") -> None:
        """End every sample that has not ended."""
        for index in self.unfinished():
            handle = self.request.first_handle + index
            self.finish(index, SequenceFinish(handle, reason, message=message))

    def refuse(self, message: str) -> None:
        """The core would not take the request."""
        if not self.is_finished:
            self._refusal = message
            self._num_unfinished = 0
            self._wake()

    def unfinished(self) -> list[int]:
        """Indices of the samples that have not ended."""
        if self.is_finished:
            return []
        return [i for i, sample in enumerate(self.samples) if sample.finish is None]

    def _wake(self) -> None:
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # --- what the reader does -------------------------------------------------------------------

    def abort(self, sample_index: int | None = None) -> None:
        ending = [i for i in self.unfinished() if sample_index is None or i == sample_index]
        for index in ending:
            handle = self.request.first_handle + index
            self.finish(index, SequenceFinish(handle, FinishReason.ABORT))
        if ending:
            self._on_abort(ending)

    def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        return self

    async def __anext__(self) -> RequestUpdate:
        while not self._has_news:
            if self.is_finished:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._has_news = False
        if self._refusal is not None:
            raise RequestError(self._refusal)
        return self._take_update()

    def _take_update(self) -> RequestUpdate:
        update = RequestUpdate(
            [self._take_sample(i, s) for i, s in enumerate(self.samples) if _has_news(s)],
            list(self._prompt_logprobs.values()),
            None if self._is_cached_read else self._num_cached_tokens,
        )
        self._prompt_logprobs.clear()
        self._is_cached_read = self._num_cached_tokens is not None
        return update

    def _take_sample(self, index: int, sample: SampleProgress) -> SampleUpdate:
        news = SampleUpdate(
            index, sample.token_ids[sample.num_read :], sample.logprobs, sample.finish
        )
        sample.num_read, sample.logprobs = len(sample.token_ids), []
        sample.is_finish_read = sample.finish is not None
        return news

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


def _has_news(sample: SampleProgress) -> bool:
    has_finish = sample.finish is not None and not sample.is_finish_read
    return has_finish or sample.num_read < len(sample.token_ids)
