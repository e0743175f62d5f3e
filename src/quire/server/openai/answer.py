"""What the answers of both APIs share: their heads, whole samples, and the merging of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.protocol.step import TokenLogprobs
from quire.server.generation.follow import NeverFull
from quire.server.generation.service import Generation, SampleDelta
from quire.server.openai.usage import Usage
from quire.server.readings.timeline import Timeline
from quire.server.requests.bodies import GenerationRequest

__all__ = ["AnswerHead", "WholeSample", "collect", "encode", "run_all", "wants_usage"]

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
"""To JSON, as UTF-8 bytes."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of an answer repeats. kind: the `object` field; created: Unix seconds."""

    id: str
    kind: str
    created: int
    model: str

    def event_start(self) -> bytes:
        """A chunk up to the place of its choices: `data: {…,"choices":[`."""
        fields = {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
        }
        return b"data: " + encode(fields)[:-1] + b',"choices":['

    def last_event(self, usage: Usage | None, timeline: Timeline | None) -> bytes:
        """The chunk without choices that ends a stream which asked for more than text."""
        extra = b""
        if usage is not None:
            extra += b',"usage":' + encode(usage)
        if timeline is not None:
            extra += b',"timeline":' + encode(timeline.as_dict())
        return self.event_start() + b"]" + extra + b"}\n\n" if extra else b""


@dataclass(slots=True)
class WholeSample:
    """A sample, whole when it has ended."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: str = "stop"
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: SampleDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


async def collect(generation: Generation) -> list[WholeSample]:
    """All samples of a prompt, by index. Errors as in `Generation.run`."""
    samples = [WholeSample() for _ in range(generation.params.n)]

    def take(deltas: list[SampleDelta]) -> None:
        for delta in deltas:
            samples[delta.index].add(delta)

    await generation.run(take, NeverFull())
    return samples


async def run_all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run at the same time; the first failure ends the others and is raised."""
    if len(works) == 1:
        await works[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def wants_usage(body: GenerationRequest, *, always: bool) -> tuple[bool, bool]:
    """Whether a stream gives its usage at the end, and in every chunk."""
    options = body.stream_options
    in_each = options is not None and bool(options.continuous_usage_stats)
    at_end = always or (options is not None and bool(options.include_usage))
    return at_end or in_each, in_each
