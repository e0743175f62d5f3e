"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.outputs import WeightVersionSpan
from quire.protocol.sampling_params import SamplingParams
from quire.server.generation.parsed import AnswerForm
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
    wants_usage,
)
from quire.server.openai.job import Job
from quire.server.openai.logprobs import LogprobsWriter
from quire.server.openai.parts import ChatMessage, PartsWriter, message_of, reason_of
from quire.server.openai.usage import Usage, usage_of
from quire.server.requests.bodies import ChatRequest

__all__ = ["CHAT_SHAPE", "ChatAnswer", "ChatCompletion"]

CHAT_SHAPE = ChunkShape(
    opening=b'"delta":{"role":"assistant","content":',
    before=b'"delta":{"content":',
    after=b"}",
    opens_empty=True,
    stop_reason_in_each=False,
    prompt_ids_in_choice=False,
)


class ChatLogprobs(msgspec.Struct):
    content: list[Any]
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: Sequence[WeightVersionSpan] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: Any = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timeline: dict[str, Any] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to one request, whole or streamed. form: form of parsed answers."""

    job: Job
    body: ChatRequest
    params: SamplingParams
    form: AnswerForm | None = None

    async def whole(self) -> bytes:
        """Return the JSON body. Errors as in `GenerationService.open` and `Generation.run`."""
        head, body = self._head("chat.completion"), self.body
        async with self._open() as generation:
            samples = await collect(generation)
            answer = ChatCompletion(
                head.id,
                head.kind,
                head.created,
                head.model,
                [await self._choice(i, sample, generation) for i, sample in enumerate(samples)],
                usage_of([generation]),
            )
            if self.params.prompt_logprobs is not None:
                writer = self.job.logprobs(self.params.prompt_logprobs, body, generation)
                answer.prompt_logprobs = await writer.prompt_by_turns(generation.prompt_logprobs)
            if body.return_token_ids:
                answer.prompt_token_ids = generation.prompt.token_ids
        if body.return_timeline:
            answer.timeline = self.job.timeline.as_dict()
        return encode(answer)

    async def stream(self, sink: EventSink) -> bytes:
        """Start the stream when the engine has taken the prompt. Writes all events but the last
        ones, which it returns. Errors as in `whole`."""
        at_end, in_each = wants_usage(self.body, always=self.job.always_usage)
        head = self._head("chat.completion.chunk")
        async with self._open() as generation:
            await generation.settle()
            await sink.start()
            event = self._chunks(head, generation, usage_in_each=in_each).event

            def write(deltas: list[SampleDelta]) -> None:
                sink.write(b"".join(map(event, deltas)))

            await generation.run(write, sink)
        usage = usage_of([generation]) if at_end else None
        timeline = self.job.timeline if self.body.return_timeline else None
        return head.last_event(usage, timeline) + DONE

    def _chunks(
        self, head: AnswerHead, generation: Generation, *, usage_in_each: bool
    ) -> ChunkWriter | PartsWriter:
        wants_logprobs = self.params.logprobs is not None
        logprobs = [
            _PieceLogprobs(self._writer(generation))
            for _ in range(self.params.n if wants_logprobs else 0)
        ]
        extras = ChunkExtras(
            logprobs, has_ids=bool(self.body.return_token_ids), usage_in_each=usage_in_each
        )
        if self.form is None:
            return ChunkWriter(head, CHAT_SHAPE, generation, extras)
        return PartsWriter(
            head,
            generation,
            extras,
            is_named=self.form.is_named,
            shows_reasoning=self._shows_reasoning,
        )

    @property
    def _shows_reasoning(self) -> bool:
        return self.body.include_reasoning is not False

    def _open(self) -> AbstractAsyncContextManager[Generation]:
        render = functools.partial(self.job.render_chat, self.body, self.form)
        return self.job.open(render, self.params, self.body, self.form)

    def _head(self, kind: str) -> AnswerHead:
        return self.job.head("chatcmpl-", kind)

    def _writer(self, generation: Generation) -> LogprobsWriter:
        return self.job.logprobs(self.params.logprobs or 0, self.body, generation)

    async def _choice(self, index: int, sample: WholeSample, generation: Generation) -> ChatChoice:
        logprobs = None
        if self.params.logprobs is not None:
            writer = self._writer(generation)
            logprobs = ChatLogprobs(await writer.chat_by_turns(sample.logprobs))
        message, reason = ChatMessage(sample.text), sample.finish_reason
        if self.form is not None:
            message = message_of(sample.parts, shows_reasoning=self._shows_reasoning)
            reason = reason_of(
                reason,
                has_calls=message.tool_calls is not UNSET,
                is_named=self.form.is_named,
            )
        return ChatChoice(
            index,
            message,
            logprobs,
            reason,
            sample.stop_reason,
            sample.token_ids if self.body.return_token_ids else UNSET,
            sample.shown_versions,
        )


class _PieceLogprobs:
    """`PieceLogprobs` of one sample."""

    def __init__(self, writer: LogprobsWriter) -> None:
        self._writer = writer

    def piece(self, delta: SampleDelta, _text: str, /) -> tuple[bytes, bool]:
        if not delta.logprobs:
            return b"null", False
        return b'{"content":' + encode(self._writer.chat(delta.logprobs)) + b"}", True
