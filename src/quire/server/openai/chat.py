"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.sampling_params import SamplingParams
from quire.server.generation.service import Generation, SampleDelta
from quire.server.http.events import DONE, EventSink
from quire.server.openai.answer import AnswerHead, WholeSample, collect, encode, wants_usage
from quire.server.openai.job import Job
from quire.server.openai.logprobs import LogprobsWriter
from quire.server.openai.usage import Usage, usage_of
from quire.server.requests.bodies import ChatRequest

__all__ = ["ChatAnswer", "ChunkWriter"]

_PLAIN_END = b'},"logprobs":null,"finish_reason":null}]}\n\n'
"""What follows the text of a chunk that has nothing else."""


class _Logprobs(msgspec.Struct):
    content: list[object]
    refusal: None = None


class _Message(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class _Choice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: _Logprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class _Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    usage: Usage
    prompt_logprobs: object = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timeline: dict[str, object] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to one request, whole or as a stream."""

    job: Job
    body: ChatRequest
    params: SamplingParams

    async def whole(self) -> bytes:
        """The JSON body. Errors as in `GenerationService.open` and `Generation.run`."""
        head, body = self._head("chat.completion"), self.body
        async with self._open() as generation:
            samples = await collect(generation)
            answer = _Completion(
                head.id,
                head.kind,
                head.created,
                head.model,
                [self._choice(index, sample, generation) for index, sample in enumerate(samples)],
                usage_of([generation]),
            )
            if self.params.prompt_logprobs is not None:
                writer = self.job.logprobs(self.params.prompt_logprobs, body, generation)
                answer.prompt_logprobs = writer.prompt(generation.prompt_logprobs)
            if body.return_token_ids:
                answer.prompt_token_ids = generation.prompt.token_ids
        if body.return_timeline:
            answer.timeline = self.job.timeline.as_dict()
        return encode(answer)

    async def stream(self, sink: EventSink) -> bytes:
        """Start when the engine has taken the prompt; write all events but the last ones, which are
        returned. Errors as in `whole`."""
        at_end, in_each = wants_usage(self.body, always=self.job.always_usage)
        head = self._head("chat.completion.chunk")
        async with self._open() as generation:
            await sink.start()
            chunks = ChunkWriter(
                head.event_start(),
                generation,
                lambda: self._writer(generation),
                self.body,
                usage_in_each=in_each,
            )

            def write(deltas: list[SampleDelta]) -> None:
                sink.write(b"".join(map(chunks.event, deltas)))

            await generation.run(write, sink)
        usage = usage_of([generation]) if at_end else None
        timeline = self.job.timeline if self.body.return_timeline else None
        return head.last_event(usage, timeline) + DONE

    def _open(self) -> AbstractAsyncContextManager[Generation]:
        job = self.job
        render = partial(
            job.prompts.render_chat,
            job.ready.model.front.renderer,
            self.body,
            job.ready.capacity.max_model_len,
        )
        return job.open(render, self.params, self.body)

    def _head(self, kind: str) -> AnswerHead:
        return self.job.head("chatcmpl-", kind)

    def _writer(self, generation: Generation) -> LogprobsWriter:
        return self.job.logprobs(self.params.logprobs or 0, self.body, generation)

    def _choice(self, index: int, sample: WholeSample, generation: Generation) -> _Choice:
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = _Logprobs(list(self._writer(generation).chat(sample.logprobs)))
        return _Choice(
            index,
            _Message(sample.text),
            logprobs,
            sample.finish_reason,
            sample.stop_reason,
            sample.token_ids if self.body.return_token_ids else UNSET,
        )


class ChunkWriter:
    """Writes chunks around prepared bytes: only text, log-probabilities and the end vary."""

    def __init__(
        self,
        start: bytes,
        generation: Generation,
        new_writer: Callable[[], LogprobsWriter],
        body: ChatRequest,
        *,
        usage_in_each: bool,
    ) -> None:
        n = generation.params.n
        self._starts = [start + b'{"index":%d,"delta":{' % index for index in range(n)]
        self._later = [start + b'"content":' for start in self._starts]
        self._has_begun = [False] * n
        self._generation = generation
        self._writers = [new_writer() for _ in range(n)]
        self._has_logprobs = generation.params.logprobs is not None
        self._has_ids = bool(body.return_token_ids)
        self._usage_in_each = usage_in_each
        self._is_plain = not (self._has_logprobs or self._has_ids or usage_in_each)

    def event(self, delta: SampleDelta) -> bytes:
        """One chunk; empty if it would say nothing (text may be held back for a stop string)."""
        begun = self._has_begun[delta.index]
        if self._is_plain and begun and delta.finish_reason is None:
            text = delta.text
            return b"%b%b%b" % (self._later[delta.index], encode(text), _PLAIN_END) if text else b""
        silent = not delta.text and delta.finish_reason is None and not self._has_ids
        if begun and silent and not (self._has_logprobs and delta.logprobs):
            return b""
        self._has_begun[delta.index] = True
        parts = [
            self._starts[delta.index],
            b'"content":' if begun else b'"role":"assistant","content":',
            encode(delta.text),
            b'},"logprobs":',
            self._logprobs_of(delta),
        ]
        if delta.finish_reason is None:
            parts.append(b',"finish_reason":null')
        else:
            parts.append(b',"finish_reason":"%s","stop_reason":' % delta.finish_reason.encode())
            parts.append(encode(delta.stop_reason))
        if self._has_ids:
            parts += (b',"token_ids":', encode(delta.token_ids))
        parts.append(b"}]")
        if self._has_ids and not begun:
            parts += (b',"prompt_token_ids":', encode(self._generation.prompt.token_ids))
        if self._usage_in_each:
            parts += (b',"usage":', encode(usage_of([self._generation])))
        parts.append(b"}\n\n")
        return b"".join(parts)

    def _logprobs_of(self, delta: SampleDelta) -> bytes:
        if not self._has_logprobs or not delta.logprobs:
            return b"null"
        return b'{"content":' + encode(self._writers[delta.index].chat(delta.logprobs)) + b"}"
