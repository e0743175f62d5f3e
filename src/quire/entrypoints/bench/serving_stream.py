"""One streamed answer and its times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.entrypoints.client.remote import error_message

__all__ = ["AnswerReader", "AnswerTimes"]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class AnswerTimes:
    """Seconds of one clock. chunks: arrival of each chunk with output. error: reason
    of a failure."""

    start: float
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


class AnswerReader:
    """Reads the parts of a response as they arrive, however they are cut."""

    def __init__(self, start: float) -> None:
        self.times = AnswerTimes(start)
        self._rest = b""
        self._refusal = b""
        self._is_done = False

    def feed(self, status: int, body: bytes, now: float) -> None:
        """A part of the body, and when it arrived."""
        if status != 200:
            self._refusal += body
            return
        data = self._rest + body
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            if data.startswith(b"data:", start):
                self._read(data[start + 5 : end].strip(), now)
            start = end + 1
        self._rest = data[start:]

    def finish(self, status: int, now: float) -> AnswerTimes:
        """When the response has ended. Servers that send no usage are counted by chunks."""
        times = self.times
        times.end = times.chunks[-1] if times.chunks else now
        if status != 200:
            times.error = f"status {status}: {error_message(self._refusal)}"
        elif times.error is None and not self._is_done:
            times.error = "the stream ended without [DONE]"
        elif times.error is None and not times.chunks:
            times.error = "the answer is empty"
        times.num_output_tokens = times.num_output_tokens or len(times.chunks)
        return times

    def _read(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = _EVENT.decode(data)
        except msgspec.DecodeError as error:
            self.times.error = f"an event is no JSON of this API: {error}"
            return
        if event.error is not None:
            self.times.error = error_message(data)
        if any(_has_output(choice) for choice in event.choices):
            self.times.chunks.append(now)
        if event.usage is not None:
            self.times.num_prompt_tokens = event.usage.prompt_tokens
            self.times.num_output_tokens = event.usage.completion_tokens


def _has_output(choice: _Choice) -> bool:
    """Return whether the chunk carries tokens. The first chunk of a chat, which only names the
    role, may be sent before anything is computed."""
    if choice.finish_reason is not None or choice.text is not None:
        return True
    delta = choice.delta
    if delta is None:
        return False
    return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
