"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.outputs import WeightVersionSpan
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step import TokenLogprobs
from quire.server.generation.prompts import EmbedsPrompt, Prompt
from quire.server.generation.service import Generation, SampleDelta
from quire.server.http.events import DONE, EventSink
from quire.server.openai.answer import (
    AnswerHead,
    ChunkExtras,
    ChunkShape,
    ChunkWriter,
    WholeSample,
    collect,
    encode,
    run_all,
    wants_usage,
)
from quire.server.openai.job import Job
from quire.server.openai.logprobs import CompletionLogprobs, LogprobsWriter
from quire.server.openai.usage import Usage, usage_of
from quire.server.requests.bodies import CompletionRequest
from quire.text.rendering import TokenOffsets

__all__ = ["CompletionAnswer", "TextCompletion"]

_SHAPE = ChunkShape(
    opening=b'"text":',
    before=b'"text":',
    after=b"",
    opens_empty=False,
    stop_reason_in_each=True,
    prompt_ids_in_choice=True,
)


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    prompt_logprobs: Any = UNSET
    weight_versions: Sequence[WeightVersionSpan] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    timeline: dict[str, Any] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """The answer to one request, whole or streamed. Sample i of prompt p has the index p × n +
    i."""

    job: Job
    body: CompletionRequest
    params: SamplingParams
    prompts: list[Prompt]

    async def whole(self) -> bytes:
        """Return the JSON body. Errors as in `GenerationService.open` and `Generation.run`."""
        head = self._head()
        choices: dict[int, TextChoice] = {}
        generations: list[Generation] = []

        async def answer(number: int, prompt: Prompt) -> None:
            async with self._open(prompt) as generation:
                generations.append(generation)
                echo = await self._echo_of(generation)
                samples = await collect(generation)
                for index, sample in enumerate(samples, start=number * self.params.n):
                    choices[index] = await self._choice(index, sample, echo)

        await run_all([answer(number, prompt) for number, prompt in enumerate(self.prompts)])
        found = TextCompletion(
            head.id,
            head.kind,
            head.created,
            head.model,
            [choices[index] for index in sorted(choices)],
            usage_of(generations, with_output=self._has_output),
        )
        if self.body.return_timeline:
            found.timeline = self.job.timeline.as_dict()
        return encode(found)

    async def stream(self, sink: EventSink) -> bytes:
        """Start the stream when the engine has taken all prompts. Writes all events but the last
        ones, which it returns. Errors as in `whole`."""
        at_end, in_each = wants_usage(self.body, always=self.job.always_usage)
        head = self._head()
        generations: list[Generation] = []

        async def answer(number: int, prompt: Prompt) -> None:
            async with self._open(prompt) as generation:
                await generation.settle()
                generations.append(generation)
                if len(generations) == len(self.prompts):
                    await sink.start()
                echo = await self._echo_of(generation)
                chunks = self._chunks(head, echo, number, usage_in_each=in_each)

                def write(deltas: list[SampleDelta]) -> None:
                    sink.write(b"".join(map(chunks.event, map(self._shown, deltas))))

                await generation.run(write, sink)

        await run_all([answer(number, prompt) for number, prompt in enumerate(self.prompts)])
        usage = usage_of(generations, with_output=self._has_output) if at_end else None
        timeline = self.job.timeline if self.body.return_timeline else None
        return head.last_event(usage, timeline) + DONE

    @property
    def _has_output(self) -> bool:
        """False for max_tokens 0: one token is computed, and not shown."""
        return self.body.max_tokens != 0

    def _chunks(
        self, head: AnswerHead, echo: _Echo, number: int, *, usage_in_each: bool
    ) -> ChunkWriter:
        n = self.params.n
        logprobs = [self._new_logprobs(echo) for _ in range(n)]
        extras = ChunkExtras(
            [each for each in logprobs if each is not None],
            has_ids=bool(self.body.return_token_ids),
            usage_in_each=usage_in_each,
        )
        return ChunkWriter(
            head, _SHAPE, echo.generation, extras, first_index=number * n, echo=echo.text
        )

    def _shown(self, delta: SampleDelta) -> SampleDelta:
        """Return the part of a delta that the answer shows."""
        if self._has_output:
            return delta
        return SampleDelta(delta.index, "", [], [], delta.finish_reason and "length", None)

    def _shown_sample(self, sample: WholeSample) -> WholeSample:
        """Return the part of a sample that the answer shows."""
        if self._has_output:
            return sample
        return WholeSample(finish_reason="length")

    def _new_logprobs(self, echo: _Echo) -> _ChoiceLogprobs | None:
        """Return the writer of one choice's log-probabilities, if they are asked for."""
        if self.body.logprobs is None:
            return None
        generation, renderer = echo.generation, self.job.renderer
        writer = self.job.logprobs(
            self.body.logprobs, self.body, generation, echo=bool(self.body.echo)
        )
        offsets = renderer.output_offsets(
            generation.prompt.known_token_ids, generation.params, len(echo.text)
        )
        return _ChoiceLogprobs(writer, offsets, echo)

    async def _echo_of(self, generation: Generation) -> _Echo:
        if not self.body.echo:
            return _Echo(generation)
        prompt, params, renderer = generation.prompt, generation.params, self.job.renderer
        text = renderer.prompt_text(prompt, params)
        if self.body.logprobs is None:
            return _Echo(generation, text)
        work = partial(
            renderer.prompt_offsets, prompt, params, self.body.add_special_tokens is not False
        )
        return _Echo(generation, text, await self.job.prompts.run(work, len(prompt.token_ids)))

    def _open(self, prompt: Prompt) -> AbstractAsyncContextManager[Generation]:
        job = self.job
        if isinstance(prompt, EmbedsPrompt):
            render = partial(job.prompts.render_embeds, prompt)
            return job.open(render, self.params, self.body)
        render = partial(
            job.prompts.render_prompt,
            job.ready.model.front.renderer,
            prompt,
            job.ready.capacity.max_model_len,
            add_special_tokens=self.body.add_special_tokens is not False,
        )
        return job.open(render, self.params, self.body)

    def _head(self) -> AnswerHead:
        return self.job.head("cmpl-", "text_completion")

    async def _choice(self, index: int, sample: WholeSample, echo: _Echo) -> TextChoice:
        sample, generation = self._shown_sample(sample), echo.generation
        text, writer = echo.text + sample.text, self._new_logprobs(echo)
        logprobs = None
        if writer is not None:
            logprobs = await writer.whole(sample.token_ids, sample.logprobs, text_end=len(text))
        choice = TextChoice(
            index,
            text,
            logprobs,
            sample.finish_reason,
            sample.stop_reason,
            weight_versions=sample.shown_versions,
        )
        if self.body.prompt_logprobs is not None:
            of_prompt = self.job.logprobs(self.body.prompt_logprobs, self.body, generation)
            choice.prompt_logprobs = await of_prompt.prompt_by_turns(generation.prompt_logprobs)
        if self.body.return_token_ids:
            choice.token_ids = sample.token_ids
            choice.prompt_token_ids = generation.prompt.token_ids
        return choice


@dataclass(frozen=True, slots=True)
class _Echo:
    """The repeated part of a prompt: its text, and the offset of each token in it."""

    generation: Generation
    text: str = ""
    offsets: Sequence[int] = ()


class _ChoiceLogprobs:
    """Log-probabilities of one choice, piece by piece. The first piece includes those of an echoed
    prompt."""

    def __init__(self, writer: LogprobsWriter, offsets: TokenOffsets | None, echo: _Echo) -> None:
        self._writer = writer
        self._offsets = offsets
        self._echo = echo
        self._num_prompt = len(echo.offsets)
        self._num_chars = 0
        self._is_first = True

    def piece(self, delta: SampleDelta, text: str, /) -> tuple[bytes, bool]:
        """See `PieceLogprobs`."""
        is_first, self._is_first = self._is_first, False
        self._num_chars += len(text)
        text_end = None if delta.finish_reason is None else self._num_chars
        if not (is_first or delta.token_ids or text_end is not None):
            return b"null", False
        found = self._next(delta.token_ids, delta.logprobs, text_end)
        return encode(self._writer.completion(*found)), True

    async def whole(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], *, text_end: int
    ) -> CompletionLogprobs:
        """Return those of all tokens. text_end: length of the text. Errors as in
        `LogprobsWriter.completion`."""
        found = self._next(token_ids, logprobs, text_end)
        return await self._writer.completion_by_turns(*found)

    def _next(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text_end: int | None
    ) -> tuple[Sequence[int], list[TokenLogprobs | None], list[int]]:
        """Return the next tokens, their log-probabilities and offsets. text_end: length of the
        text, if known; a stop string may have cut some off."""
        offsets = self._offsets_of(token_ids)
        entries: list[TokenLogprobs | None] = [*logprobs]
        if self._num_prompt:
            self._num_prompt = 0
            generation = self._echo.generation
            token_ids = [*generation.prompt.token_ids, *token_ids]
            entries = [*generation.prompt_logprobs, *entries]
            offsets = [*self._echo.offsets, *offsets]
        if text_end is not None:
            offsets = [min(offset, text_end) for offset in offsets]
        return token_ids, entries, offsets

    def _offsets_of(self, token_ids: Sequence[int]) -> list[int]:
        if self._offsets is None:
            return [len(self._echo.text)] * len(token_ids)
        return self._offsets.append(token_ids)
