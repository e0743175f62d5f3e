"""Parts that the answers of both APIs share: heads, whole samples, and the merging of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.outputs import WeightVersionSpan
from quire.protocol.step import TokenLogprobs
from quire.server.generation.follow import NeverFull
from quire.server.generation.service import Generation, SampleDelta
from quire.server.openai.usage import Usage, usage_of
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import GenerationRequest
from quire.text.dialect import Part

__all__ = [
    "AnswerHead",
    "ChunkShape",
    "ChunkWriter",
    "WholeSample",
    "collect",
    "encode",
    "encoded_by_turns",
    "run_all",
    "wants_usage",
]

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
"""Encode as JSON, in UTF-8."""

ITEMS_PER_TURN = 16

Items = TypeVar("Items")


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Fields that every chunk of an answer repeats. kind: the `object` field. created: Unix
    seconds."""

    id: str
    kind: str
    created: int
    model: str

    def event_start(self) -> bytes:
        """The beginning of a chunk, up to its choices: `data: {…,"choices":[`."""
        fields = {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
        }
        return b"data: " + encode(fields)[:-1] + b',"choices":['

    def last_event(self, usage: Usage | None, timeline: Timeline | None) -> bytes:
        """Return the chunk without choices that ends a stream which asked for more than text."""
        extra = b""
        if usage is not None:
            extra += b',"usage":' + encode(usage)
        if timeline is not None:
            extra += b',"timeline":' + encode(timeline.as_dict())
        return self.event_start() + b"]" + extra + b"}\n\n" if extra else b""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The JSON around the text of one choice in a chunk.

    opening: before the text of a sample's first chunk, after its index. before, after: around all
    other texts. opens_empty: True if the first chunk is sent even without text.
    stop_reason_in_each: True if chunks have the field even without a stop reason.
    prompt_ids_in_choice: True if prompt ids stand in the choice, not beside the choices.
    """

    opening: bytes
    before: bytes
    after: bytes
    opens_empty: bool
    stop_reason_in_each: bool
    prompt_ids_in_choice: bool


class PieceLogprobs(Protocol):
    """Writes the log-probabilities of one sample, piece by piece."""

    def piece(self, delta: SampleDelta, text: str, /) -> tuple[bytes, bool]:
        """Return the JSON of the next piece, and True if it has any content. text: shown by the
        same chunk."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkExtras:
    """Contents of chunks beside the text. logprobs: one writer for each sample, if asked. has_ids:
    token ids are shown."""

    logprobs: Sequence[PieceLogprobs] = ()
    has_ids: bool = False
    usage_in_each: bool = False


PLAIN_CHUNKS = ChunkExtras()


class ChunkWriter:
    """Writes the chunks of one prompt around prepared bytes; only text, log-probabilities and the
    end vary."""

    def __init__(
        self,
        head: AnswerHead,
        shape: ChunkShape,
        generation: Generation,
        extras: ChunkExtras = PLAIN_CHUNKS,
        *,
        first_index: int = 0,
        echo: str = "",
    ) -> None:
        """first_index: index of the first choice. echo: text before each sample."""
        n, start = generation.params.n, head.event_start()
        starts = [start + b'{"index":%d,' % (first_index + i) for i in range(n)]
        self._openings = [each + shape.opening for each in starts]
        self._befores = [each + shape.before for each in starts]
        self._shape = shape
        self._has_begun = [False] * n
        self._generation = generation
        self._logprobs, self._has_ids = extras.logprobs, extras.has_ids
        self._usage_in_each = extras.usage_in_each
        self._echo = echo
        self._is_plain = not (extras.logprobs or extras.has_ids or extras.usage_in_each)
        self._plain_end = b"".join(
            (shape.after, b',"logprobs":null', *self._ending_of(None, None), b"}]}\n\n")
        )

    def event(self, delta: SampleDelta) -> bytes:
        """Return one chunk; empty if it would have no content (text may be held back for a stop
        string)."""
        index, text, ending = delta.index, delta.text, delta.finish_reason
        has_begun = self._has_begun[index]
        if self._is_plain and has_begun and ending is None:
            return (
                b"%b%b%b" % (self._befores[index], encode(text), self._plain_end) if text else b""
            )
        self._has_begun[index] = True
        if not has_begun:
            text = self._echo + text
        logprobs, says_logprobs = b"null", False
        if self._logprobs:
            logprobs, says_logprobs = self._logprobs[index].piece(delta, text)
        opens = not has_begun and self._shape.opens_empty
        if not (text or ending is not None or opens or self._has_ids or says_logprobs):
            return b""
        parts = [
            self._befores[index] if has_begun else self._openings[index],
            encode(text),
            self._shape.after,
            b',"logprobs":',
            logprobs,
            *self._ending_of(ending, delta.stop_reason),
        ]
        if self._has_ids:
            parts += (b',"token_ids":', encode(delta.token_ids))
        if delta.weight_versions:
            parts += (b',"weight_versions":', encode(delta.weight_versions))
        prompt_ids = b""
        if self._has_ids and not has_begun:
            prompt_ids = b',"prompt_token_ids":' + encode(self._generation.prompt.token_ids)
        in_choice = self._shape.prompt_ids_in_choice
        parts += (prompt_ids, b"}]") if in_choice else (b"}]", prompt_ids)
        if self._usage_in_each:
            parts += (b',"usage":', encode(usage_of([self._generation])))
        parts.append(b"}\n\n")
        return b"".join(parts)

    def _ending_of(
        self, finish_reason: str | None, stop_reason: int | str | None
    ) -> tuple[bytes, ...]:
        reason = (b',"finish_reason":', encode(finish_reason))
        if finish_reason is None and not self._shape.stop_reason_in_each:
            return reason
        return (*reason, b',"stop_reason":', encode(stop_reason))


@dataclass(slots=True)
class WholeSample:
    """A finished sample. parts: parts of a parsed answer, which has no text."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    parts: list[Part] = field(default_factory=list[Part])
    weight_versions: Sequence[WeightVersionSpan] = ()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: SampleDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.parts.extend(delta.parts)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.weight_versions = delta.weight_versions

    @property
    def shown_versions(self) -> Sequence[WeightVersionSpan] | UnsetType:
        """Versions of the weights, for the field of a choice; UNSET if they were not asked for."""
        return self.weight_versions or UNSET


async def collect(generation: Generation) -> list[WholeSample]:
    """Return all samples of a prompt, by index. Errors as in `Generation.run`."""
    samples = [WholeSample() for _ in range(generation.params.n)]

    def take(deltas: list[SampleDelta]) -> None:
        for delta in deltas:
            samples[delta.index].add(delta)

    await generation.run(take, NeverFull())
    return samples


async def run_all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them at the same time. The first failure ends the others and is raised."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def encoded_by_turns(items: Iterable[Items]) -> list[Items]:
    """Return items as JSON for their places. They are made and encoded a few at a time: 2,048 long
    vectors, or the log-probabilities of long answers, take seconds, in which other requests need
    their turn."""
    found: list[msgspec.Raw] = []
    for item in items:
        found.append(msgspec.Raw(encode(item)))
        if len(found) % ITEMS_PER_TURN == 0:
            await asyncio.sleep(0)
    return cast("list[Items]", found)


def wants_usage(body: GenerationRequest, *, always: bool) -> tuple[bool, bool]:
    """Return whether a stream reports its usage at the end, and whether in every chunk, which
    `include_usage: false` switches off too."""
    options = body.stream_options
    if options is None:
        return always, False
    wants_each = bool(options.continuous_usage_stats)
    is_asked = wants_each if options.include_usage is None else options.include_usage
    at_end = always or is_asked
    return at_end, at_end and wants_each
