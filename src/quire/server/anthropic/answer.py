"""POST /v1/messages: an answer as a message, or as the named events that build one."""

from __future__ import annotations

import functools
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.protocol.sampling_params import SamplingParams
from quire.server.anthropic.blocks import BlockReader, whole_blocks
from quire.server.anthropic.request import ReadRequest
from quire.server.generation.parsed import AnswerForm
from quire.server.generation.service import Generation, SampleDelta
from quire.server.http.events import EventSink
from quire.server.openai.answer import collect, encode
from quire.server.openai.job import Job
from quire.server.readings.prompt_memory import CacheVerdict
from quire.server.requests.errors import ErrorReply
from quire.text.dialect import Text

__all__ = ["Message", "MessagesAnswer", "TokenCount", "error_event"]

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class CacheCreation(msgspec.Struct):
    """Tokens that were written to a cache, by the time for which it keeps them."""

    ephemeral_1h_input_tokens: int = 0
    ephemeral_5m_input_tokens: int = 0


class MessageOutputDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts. input_tokens: tokens of the prompt, without cached ones. Writing to the cache
    is free, so no such tokens are counted. Fields of the API's own services, such as tools of its
    servers, are null.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: MessageOutputDetails
    cache_creation_input_tokens: int = 0
    cache_creation: CacheCreation = msgspec.field(default_factory=CacheCreation)
    server_tool_use: None = None
    service_tier: str = "standard"
    inference_geo: None = None
    speed: str = "standard"


class CacheMissReason(msgspec.Struct):
    """type: the part that has changed since the earlier message, "previous_message_not_found" or
    "unavailable". cache_missed_input_tokens: tokens that would have been found without a change."""

    type: str
    cache_missed_input_tokens: int | UnsetType = UNSET


class Diagnostics(msgspec.Struct):
    cache_miss_reason: CacheMissReason


class Message(msgspec.Struct):
    """content: blocks of type text, thinking or tool_use. Clients expect every field of the API,
    so those of its own services are null. diagnostics: None unless it was asked for and something
    has changed."""

    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"
    container: None = None
    diagnostics: Diagnostics | None = None
    stop_details: None = None


class TokenCount(msgspec.Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


def error_event(reply: ErrorReply) -> bytes:
    """Return the event of an error in a stream."""
    return b"event: error\ndata: " + reply.body + b"\n\n"


@dataclass(frozen=True, slots=True)
class MessagesAnswer:
    """The answer to one request."""

    job: Job
    read: ReadRequest
    params: SamplingParams
    form: AnswerForm | None

    async def whole(self) -> bytes:
        """Return the JSON body. Errors as in `GenerationService.open` and `Generation.run`."""
        reader = BlockReader(hides_thinking=self.read.hides_thinking)
        async with self._open() as generation:
            (sample,) = await collect(generation)
            parts = sample.parts if self.form is not None else [Text(sample.text)]
            events = [*reader.take(parts), *reader.finish()]
            reason, sequence = _ending(sample.finish_reason, sample.stop_reason, reader)
            message = self._message(generation, whole_blocks(iter(events)), reason, sequence)
        return encode(message)

    async def stream(self, sink: EventSink) -> bytes:
        """Start the stream when the engine has taken the prompt. Writes all events but the last
        ones, which it returns. Errors as in `whole`."""
        async with self._open() as generation:
            await generation.settle()
            await sink.start()
            writer = _Writer(self, generation)

            def write(deltas: list[SampleDelta]) -> None:
                sink.write(b"".join(map(writer.events, deltas)))

            await generation.run(write, sink)
            return writer.last_events()

    def _open(self) -> AbstractAsyncContextManager[Generation]:
        chat = self.read.chat
        render = functools.partial(self.job.render_chat, chat, self.form)
        return self.job.open(render, self.params, chat, self.form, fits_room=True)

    def _message(
        self,
        generation: Generation,
        content: list[dict[str, Any]],
        reason: StopReason | None,
        sequence: str | None,
    ) -> Message:
        head = self.job.head("msg_", "message")
        message = Message(head.id, head.model, content, reason, sequence, _usage(generation))
        if self.read.previous_id is not None:
            size = self.job.ready.capacity.block_size
            verdict = generation.known.compared(self.read.previous_id, size)
            message.diagnostics = _diagnostics(verdict)
        return message

    def start_event(self, generation: Generation) -> bytes:
        """Return the first event: the message before it has any content."""
        return _event(
            {"type": "message_start", "message": self._message(generation, [], None, None)}
        )


class _Writer:
    """Writes the events of a stream. The first event waits for the first tokens, which tell how
    much of the prompt was cached."""

    def __init__(self, answer: MessagesAnswer, generation: Generation) -> None:
        self._answer = answer
        self._generation = generation
        self._reader = BlockReader(hides_thinking=answer.read.hides_thinking)
        self._has_begun = False
        self._ending: tuple[StopReason, str | None] = ("end_turn", None)

    def events(self, delta: SampleDelta) -> bytes:
        """Return the events of one delta."""
        parts = [Text(delta.text)] if delta.text else delta.parts
        found = [_event(event) for event in self._reader.take(parts)]
        if not self._has_begun:
            self._has_begun = True
            found.insert(0, self._answer.start_event(self._generation))
        if delta.finish_reason is not None:
            found += map(_event, self._reader.finish())
            self._ending = _ending(delta.finish_reason, delta.stop_reason, self._reader)
        return b"".join(found)

    def last_events(self) -> bytes:
        """Return the events that end the message."""
        reason, sequence = self._ending
        end = {
            "type": "message_delta",
            "delta": {
                "stop_reason": reason,
                "stop_sequence": sequence,
                "stop_details": None,
                "container": None,
            },
            "usage": _usage(self._generation),
        }
        return _event(end) + _event({"type": "message_stop"})


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


def _usage(generation: Generation) -> MessageUsage:
    num_prompt = len(generation.prompt.token_ids)
    num_cached = min(generation.num_cached_tokens, num_prompt)
    details = MessageOutputDetails(generation.num_reasoning_tokens or 0)
    return MessageUsage(num_prompt - num_cached, generation.num_tokens, num_cached, details)


_CHANGES = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "system_changed",
    "message": "messages_changed",
}


def _diagnostics(verdict: CacheVerdict | None) -> Diagnostics | None:
    """Return the API's words for a verdict on the earlier message, which is None if it is
    unknown."""
    if verdict is None:
        return Diagnostics(CacheMissReason("previous_message_not_found"))
    if verdict.goes_on:
        return None
    changed = _CHANGES.get(verdict.changed or "")
    if changed is None:
        return Diagnostics(CacheMissReason("unavailable"))
    return Diagnostics(CacheMissReason(changed, verdict.num_missed))


def _ending(
    reason: str, stop: int | str | None, reader: BlockReader
) -> tuple[StopReason, str | None]:
    """Return the reason of the end, and the stop sequence that was found."""
    if reason in ("length", "repetition"):  # a text that was cut; the API knows no loops
        return "max_tokens", None
    if reason == "content_filter":
        return "refusal", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if reader.has_calls else "end_turn"), None
