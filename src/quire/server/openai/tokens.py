"""POST /inference/v1/generate: token ids in, token ids out, without any text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.outputs import WeightVersionSpan
from quire.protocol.sampling_params import SamplingParams
from quire.server.generation.service import Generation, SampleDelta
from quire.server.http.events import DONE, EventSink
from quire.server.openai.answer import collect, encode
from quire.server.openai.job import Job
from quire.server.openai.logprobs import LogprobsWriter
from quire.server.openai.usage import Usage, usage_of
from quire.server.requests.bodies import CompletionRequest, TokensRequest
from quire.server.requests.errors import RefusedError
from quire.text.rendering import RenderedPrompt

__all__ = ["GeneratedTokens", "TokensAnswer", "sampling_of"]


class TokensChoice(msgspec.Struct):
    """token_ids: ids of the answer, or of one piece. logprobs: object in the form of chats."""

    index: int
    token_ids: list[int]
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    weight_versions: Sequence[WeightVersionSpan] | UnsetType = UNSET


class GeneratedTokens(msgspec.Struct):
    """An answer, or one piece of it. prompt_logprobs: list in the form of completions, if asked."""

    request_id: str
    choices: list[TokensChoice]
    usage: Usage | None = None
    prompt_logprobs: Any = UNSET


_BESIDE = (
    "model", "stream", "stream_options", "request_id", "cache_salt", "priority", "deadline_s",
)  # fmt: skip
"""Fields beside the parameters."""


def sampling_of(body: TokensRequest) -> CompletionRequest:
    """Return a request's parameters together with the fields beside them. Raises RefusedError if
    the parameters contain one of these."""
    fields = body.sampling_params
    for name in _BESIDE:
        if getattr(fields, name) is not None:
            raise RefusedError(
                f"{name} is given within sampling_params. Send it beside sampling_params.",
                param=f"sampling_params.{name}",
            )
        setattr(fields, name, getattr(body, name))
    return fields


@dataclass(frozen=True, slots=True)
class TokensAnswer:
    """The answer to one request, whole or streamed."""

    job: Job
    body: CompletionRequest
    params: SamplingParams
    token_ids: list[int]

    async def whole(self) -> bytes:
        """Return the JSON body. Errors as in `GenerationService.open` and `Generation.run`."""
        async with self._open() as generation:
            samples = await collect(generation)
            writers = self._writers(generation)
            choices = [
                TokensChoice(
                    index,
                    sample.token_ids,
                    {"content": await writers[index].chat_by_turns(sample.logprobs)}
                    if writers
                    else None,
                    sample.finish_reason,
                    sample.stop_reason,
                    sample.shown_versions,
                )
                for index, sample in enumerate(samples)
            ]
            found = GeneratedTokens(self._id, choices, usage_of([generation]))
            if self.params.prompt_logprobs is not None:
                writer = self.job.logprobs(self.params.prompt_logprobs, self.body, generation)
                found.prompt_logprobs = await writer.prompt_by_turns(generation.prompt_logprobs)
        return encode(found)

    async def stream(self, sink: EventSink) -> bytes:
        """Start the stream when the engine has taken the prompt. Writes all events but the last
        ones, which it returns. Errors as in `whole`."""
        options = self.body.stream_options
        async with self._open() as generation:
            await generation.settle()
            await sink.start()
            writers = self._writers(generation)

            def write(deltas: list[SampleDelta]) -> None:
                sink.write(b"".join(self._event(delta, writers) for delta in deltas))

            await generation.run(write, sink)
        if self.job.always_usage or (options is not None and options.include_usage):
            last = GeneratedTokens(self._id, [], usage_of([generation]))
            return b"data: " + encode(last) + b"\n\n" + DONE
        return DONE

    @property
    def _id(self) -> str:
        return self.job.timeline.request_id

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[Generation]:
        async with self.job.open(self._render, self.params, self.body) as generation:
            yield generation

    async def _render(self) -> RenderedPrompt:
        ready = self.job.ready
        most = ready.capacity.max_model_len
        return await self.job.prompts.render_prompt(self.job.renderer, self.token_ids, most)

    def _writers(self, generation: Generation) -> list[LogprobsWriter]:
        """Return a writer for each sample; none if no log-probabilities are asked."""
        num_top = self.params.logprobs
        if num_top is None:
            return []
        return [self.job.logprobs(num_top, self.body, generation) for _ in range(self.params.n)]

    def _event(self, delta: SampleDelta, writers: list[LogprobsWriter]) -> bytes:
        choice = TokensChoice(
            delta.index,
            list(delta.token_ids),
            {"content": writers[delta.index].chat(delta.logprobs)} if writers else None,
            delta.finish_reason,
            delta.stop_reason,
            delta.weight_versions or UNSET,
        )
        return b"data: " + encode(GeneratedTokens(self._id, [choice])) + b"\n\n"
