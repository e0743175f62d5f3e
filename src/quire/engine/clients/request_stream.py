"""The updates of one request, from the task that receives to the task that reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from quire.base.errors import RequestError
from quire.engine.clients.async_client import RequestUpdate, SampleUpdate
from quire.protocol.outputs import WeightHistory
from quire.protocol.request import EngineRequest, FinishReason, SequenceFinish, Weights
from quire.protocol.step import FloatArray, PromptLogprobs, TokenLogprobs

__all__ = ["CHECKPOINT", "RequestStream", "SampleProgress"]

CHECKPOINT = Weights()


@dataclass(slots=True)
class SampleProgress:
    """token_ids: all tokens of the sample so far; the reader has taken `num_read` of them.
    logprobs: entries not read yet. is_finish_read: whether the reader has had the last word.
    weights: see `WeightHistory`."""

    weights: WeightHistory
    token_ids: list[int] = field(default_factory=list[int])
    num_read: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish: SequenceFinish | None = None
    is_finish_read: bool = False


class RequestStream:
    """See `UpdateStream` for the reader's side. The other side is for the client, in the same event
    loop. Whatever it gives after the end of a sample is dropped, so that each ends once. It calls
    `announce` when it has given all that there is for now.

    crashes: number of cores that died while they computed this request. has_left_silence: it was
    taken from a core that went silent while it computed this request.
    """

    def __init__(
        self,
        request: EngineRequest,
        on_abort: Callable[[list[int]], None] = lambda _: None,
        weights: Weights = CHECKPOINT,
    ) -> None:
        """on_abort: told the indices of samples that the reader ends; another one, when another
        client follows the stream. weights: weights in use, as far as is known."""
        self.request = request
        self.samples = [SampleProgress(WeightHistory(weights)) for _ in range(request.params.n)]
        self.crashes = 0
        self.has_left_silence = False
        self.on_abort = on_abort
        self._num_unfinished = len(self.samples)
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._num_cached_tokens: int | None = None
        self._is_cached_read = False
        self._vector: FloatArray | None = None
        self._refusal: str | None = None
        self._has_news = False
        self._on_news: Callable[[], None] | None = None

    @property
    def is_finished(self) -> bool:
        """True if every sample has ended, or the request was refused; not whether that is read."""
        return self._num_unfinished == 0

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, over all samples."""
        return sum(len(sample.token_ids) for sample in self.samples)

    # --- what the client gives ------------------------------------------------------------------

    def take_token(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        sample = self.samples[index]
        if sample.finish is None:
            sample.token_ids.append(token_id)
            if logprobs is not None:
                sample.logprobs.append(logprobs)
            self._has_news = True

    def use_weights(self, weights: Weights) -> None:
        """The tokens that come from now on are computed with these weights."""
        for sample in self.samples:
            if sample.finish is None:
                sample.weights.change(weights, len(sample.token_ids))

    def take_prompt_logprobs(self, piece: PromptLogprobs) -> None:
        if not self.is_finished:
            self._prompt_logprobs[piece.start] = piece
            self._has_news = True

    def take_num_cached(self, num_tokens: int) -> None:
        if self._num_cached_tokens is None and not self.is_finished:
            self._num_cached_tokens = num_tokens
            for sample in self.samples:
                sample.weights.begin()
            self._has_news = True

    def take_vector(self, vector: FloatArray) -> None:
        """Take the vector; the end of the request follows at once."""
        if not self.is_finished:
            self._vector = vector
            self._has_news = True

    def finish(self, index: int, finish: SequenceFinish) -> None:
        sample = self.samples[index]
        if sample.finish is None:
            if finish.whole is not None:
                sample.token_ids += finish.whole.token_ids.tolist()
                sample.logprobs += finish.whole.logprobs
                sample.weights.came_whole()
            sample.finish = finish
            self._num_unfinished -= 1
            self._has_news = True

    def finish_all(self, reason: FinishReason, message: str = "") -> None:
        """End every sample that has not ended."""
        for index in self.unfinished():
            handle = self.request.first_handle + index
            self.finish(index, SequenceFinish(handle, reason, message=message))

    def refuse(self, message: str) -> None:
        """Fail the stream: the core refused the request."""
        if not self.is_finished:
            self._refusal = message
            self._num_unfinished = 0
            self._has_news = True

    def unfinished(self) -> list[int]:
        """Indices of the samples that have not ended."""
        if self.is_finished:
            return []
        return [i for i, sample in enumerate(self.samples) if sample.finish is None]

    def announce(self) -> None:
        """Call the listener, if there is one and there are updates."""
        if self._has_news and self._on_news is not None:
            self._on_news()

    # --- what the reader does -------------------------------------------------------------------

    def abort(self, sample_index: int | None = None) -> None:
        ending = [i for i in self.unfinished() if sample_index is None or i == sample_index]
        for index in ending:
            handle = self.request.first_handle + index
            self.finish(index, SequenceFinish(handle, FinishReason.ABORT))
        if ending:
            self.on_abort(ending)
            self.announce()

    def listen(self, on_news: Callable[[], None] | None) -> None:
        self._on_news = on_news

    def weights(self, sample_index: int) -> WeightHistory:
        return self.samples[sample_index].weights

    def take_update(self) -> RequestUpdate | None:
        if not self._has_news:
            return None
        self._has_news = False
        if self._refusal is not None:
            raise RequestError(self._refusal)
        update = RequestUpdate(
            [_take_news(i, s) for i, s in enumerate(self.samples) if _has_news(s)]
        )
        if self._prompt_logprobs:
            update.prompt_logprobs = list(self._prompt_logprobs.values())
            self._prompt_logprobs.clear()
        update.vector, self._vector = self._vector, None
        if not self._is_cached_read and self._num_cached_tokens is not None:
            update.num_cached_tokens = self._num_cached_tokens
            self._is_cached_read = True
        return update

    @property
    def is_over(self) -> bool:
        return not self._has_news and self._num_unfinished == 0

    def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        return self

    async def __anext__(self) -> RequestUpdate:
        while (update := self.take_update()) is None:
            if self.is_over:
                raise StopAsyncIteration
            came = asyncio.Event()
            self.listen(came.set)
            try:
                await came.wait()
            finally:
                self.listen(None)
        return update

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


def _take_news(index: int, sample: SampleProgress) -> SampleUpdate:
    start, end = sample.num_read, len(sample.token_ids)
    news = SampleUpdate(index, sample.token_ids[start:end], sample.logprobs, sample.finish)
    sample.num_read = end
    if sample.logprobs:
        sample.logprobs = []
    sample.is_finish_read = sample.finish is not None
    return news


def _has_news(sample: SampleProgress) -> bool:
    has_finish = sample.finish is not None and not sample.is_finish_read
    return has_finish or sample.num_read < len(sample.token_ids)
