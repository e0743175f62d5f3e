"""Answers in parts, in the form of chats: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.generation.service import Generation, SampleDelta
from quire.server.openai.answer import AnswerHead, ChunkExtras, encode
from quire.server.openai.usage import usage_of
from quire.text.dialect import CallStart, Part, Reasoning, Text
from quire.text.dialect.chat import answer_of

__all__ = ["ChatMessage", "PartsWriter", "message_of", "reason_of"]


class CalledFunction(msgspec.Struct):
    """arguments: the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """content: null if the answer is only calls or reasoning. reasoning, reasoning_content: the
    same text, under vLLM's name and under that of other servers. annotations: none, since the
    server searches nothing."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: list[Any] = msgspec.field(default_factory=list[Any])
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


def message_of(parts: Sequence[Part], *, shows_reasoning: bool) -> ChatMessage:
    """A whole answer."""
    answer = answer_of(parts)
    message = ChatMessage(answer.content)
    if answer.tool_calls:
        message.tool_calls = [
            ToolCall(call.id, CalledFunction(call.function.name, call.function.arguments))
            for call in answer.tool_calls
        ]
    if answer.reasoning is not None and shows_reasoning:
        message.reasoning = message.reasoning_content = answer.reasoning
    return message


def reason_of(ending: str, *, has_calls: bool, is_named: bool) -> str:
    """Return the `finish_reason` of an answer. An answer that was cut has "length", even within a
    call. One call that was requested by name has "stop", as in the OpenAI API."""
    return "tool_calls" if ending == "stop" and has_calls and not is_named else ending


class PartsWriter:
    """Writes the chunks of a stream: one for each part, and one for the end of each choice."""

    def __init__(
        self,
        head: AnswerHead,
        generation: Generation,
        extras: ChunkExtras,
        *,
        is_named: bool,
        shows_reasoning: bool,
    ) -> None:
        """is_named: the calls are of the one tool that the request named."""
        n, start = generation.params.n, head.event_start()
        self._starts = [start + b'{"index":%d,"delta":' % i for i in range(n)]
        self._has_begun = [False] * n
        self._is_empty = [True] * n
        self._has_calls = [False] * n
        self._generation = generation
        self._is_named = is_named
        self._shows_reasoning = shows_reasoning
        self._logprobs, self._has_ids = extras.logprobs, extras.has_ids
        self._usage_in_each = extras.usage_in_each

    def event(self, delta: SampleDelta) -> bytes:
        """Return the chunks of one delta. Log-probabilities and token ids go with the first."""
        index = delta.index
        shown = list(self._shown(delta))
        logprobs, says_logprobs, token_ids = b"null", False, delta.token_ids
        if self._logprobs:
            logprobs, says_logprobs = self._logprobs[index].piece(delta, "")
        if not shown and (self._has_ids or says_logprobs):
            shown.append({})
        chunks: list[bytes] = []
        for each in shown:
            chunks.append(self._chunk(index, each, logprobs, token_ids, b'"finish_reason":null'))
            logprobs, token_ids = b"null", ()
        if delta.finish_reason is not None:
            last = {"content": ""} if self._is_empty[index] else {}
            chunks.append(self._chunk(index, last, logprobs, token_ids, self._end(delta)))
        return b"".join(chunks)

    def _end(self, delta: SampleDelta) -> bytes:
        reason = reason_of(
            delta.finish_reason or "stop",
            has_calls=self._has_calls[delta.index],
            is_named=self._is_named,
        )
        end = b'"finish_reason":%b,"stop_reason":%b' % (encode(reason), encode(delta.stop_reason))
        if delta.weight_versions:
            end += b',"weight_versions":' + encode(delta.weight_versions)
        return end

    def _shown(self, delta: SampleDelta) -> Iterator[dict[str, Any]]:
        """Yield deltas in the form that clients read; the first one of a choice has the role
        too."""
        found = [shown for part in delta.parts if (shown := self._of_part(delta.index, part))]
        self._is_empty[delta.index] &= not delta.parts
        if not self._has_begun[delta.index]:
            self._has_begun[delta.index] = True
            content: str | None = None
            if found and "content" in found[0]:
                content = found.pop(0)["content"]
            yield {"role": "assistant", "content": content}
        yield from found

    def _of_part(self, index: int, part: Part) -> dict[str, Any] | None:
        if isinstance(part, Text):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            if not self._shows_reasoning:
                return None
            return {"reasoning": part.text, "reasoning_content": part.text}
        if isinstance(part, CallStart):
            self._has_calls[index] = True
            function = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": part.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        function = {"arguments": part.text}
        return {"tool_calls": [{"index": part.index, "function": function}]}

    def _chunk(
        self,
        index: int,
        shown: dict[str, Any],
        logprobs: bytes,
        token_ids: Sequence[int],
        end: bytes,
    ) -> bytes:
        pieces = [self._starts[index], encode(shown), b',"logprobs":', logprobs, b",", end]
        if self._has_ids:
            pieces += (b',"token_ids":', encode(token_ids))
        pieces.append(b"}]")
        if self._has_ids and "role" in shown:
            pieces += (b',"prompt_token_ids":', encode(self._generation.prompt.token_ids))
        if self._usage_in_each:
            pieces += (b',"usage":', encode(usage_of([self._generation])))
        pieces.append(b"}\n\n")
        return b"".join(pieces)
