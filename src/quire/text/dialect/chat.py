"""Chats of `LLM`: conversations in the form that the model needs, and finished answers split into
parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.protocol.outputs import (
    ChatAnswer,
    CompletionOutput,
    FunctionCall,
    RequestOutput,
    ToolCall,
)
from quire.protocol.request import FinishReason, SequenceFinish
from quire.protocol.sampling_params import SamplingParams
from quire.text.dialect.conversation import described, prepared
from quire.text.dialect.harmony import own_template
from quire.text.dialect.parser import AnswerParser
from quire.text.dialect.parts import CallArguments, CallStart, Part, Reasoning, Text
from quire.text.dialect.sample import PartsReader
from quire.text.dialect.spec import Dialect, thinking_at_end
from quire.text.dialect.tools import tool_of, tools_prompt
from quire.text.rendering import ChatTemplate, Tokenizer
from quire.text.rendering.media.parts import take_images
from quire.text.rendering.messages import checked_messages, plain_data

__all__ = ["ChatReader", "WholeChats", "answer_of"]

Message = Mapping[str, Any]


class WholeChats:
    """Chats of a model with the same tools. template: renders them."""

    def __init__(
        self,
        dialect: Dialect,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """template: template from which the dialect was found. tools: list in the form of the
        OpenAI API; only the template understands others."""
        tools = [plain_data(given) for given in tools or ()]
        self.template = own_template(dialect, template)
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._ends = frozenset(eos_token_ids) | self._dialect.stop_token_ids
        self._tools = [tool for given in tools or () if (tool := tool_of(given)) is not None]
        self._reads = bool(self._tools) or self._dialect.thinks

    def conversation(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages as plain data, with ids of calls in the family's form, and the tools in
        words if the template has no place for them. RequestError for malformed messages."""
        found = prepared(checked_messages(messages, text_only=True), self._dialect)
        if not (self._tools and self._dialect.describes_tools):
            return found
        return described(found, tools_prompt(self._tools))

    def answer_all(
        self,
        conversations: Sequence[Sequence[Message]],
        params: Sequence[SamplingParams],
        outputs: Sequence[RequestOutput],
    ) -> None:
        """Split all completions of `outputs` into parts: `CompletionOutput.answer`. params: one for
        each conversation."""
        for messages, its, output in zip(conversations, params, outputs, strict=True):
            for completion in output.outputs:
                completion.answer = ChatAnswer(None)
                if completion.token_ids or completion.error is None:
                    prompt = output.prompt_token_ids
                    completion.answer = self.answer(messages, prompt, completion, its)

    def answer(
        self,
        messages: Sequence[Message],
        prompt_token_ids: Sequence[int],
        completion: CompletionOutput,
        params: SamplingParams,
    ) -> ChatAnswer:
        """Split a whole completion into its parts. messages: the conversation that it answers."""
        reader = self.reader(messages, prompt_token_ids, params)
        if reader is None:
            return ChatAnswer(completion.text)
        return answer_of(reader.take(completion, is_last=True))

    def reader(
        self,
        messages: Sequence[Message],
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> ChatReader | None:
        """Return a reader of one answer to `messages`; None if its text is all that it has."""
        if not self._reads:
            return None
        parser = AnswerParser(
            self._dialect,
            self._tokenizer,
            self._tools,
            thinking_at_end(self._dialect, prompt_token_ids, self._tokenizer),
            prompt_token_ids=prompt_token_ids,
            num_prior_calls=_num_calls(messages),
            skip_special_tokens=params.skip_special_tokens,
            is_held=False,
        )
        return ChatReader(PartsReader(parser, params, stop_tokens={}, end_token_ids=self._ends))


class ChatReader:
    """Splits one answer of `LLM` into its parts, whole or while it grows."""

    def __init__(self, reader: PartsReader) -> None:
        self._reader = reader
        self._num_taken = 0

    def take(self, completion: CompletionOutput, *, is_last: bool) -> list[Part]:
        """Return the parts that the completion has got since the last call. is_last: the completion
        has ended."""
        new = completion.token_ids[self._num_taken :]
        self._num_taken += len(new)
        if not is_last:
            return self._reader.take(new, None).parts
        is_text = completion.finish_reason == "stop" and isinstance(completion.stop_reason, str)
        update = self._reader.take(new, None if is_text else _finish(completion))
        parts = update.parts
        if update.ending is None:  # a stop string that is a token, which the text does not contain
            parts += self._reader.take((), SequenceFinish(0, FinishReason.STOP)).parts
        return parts


def _num_calls(messages: Sequence[Message]) -> int:
    plain = checked_messages(take_images(messages)[0], text_only=True)
    return sum(len(each.get("tool_calls") or ()) for each in plain)


def _finish(completion: CompletionOutput) -> SequenceFinish:
    stop = completion.stop_reason
    return SequenceFinish(
        0,
        FinishReason(completion.finish_reason or FinishReason.LENGTH),
        stop if isinstance(stop, int) else None,
    )


def answer_of(parts: Sequence[Part]) -> ChatAnswer:
    """Join the parts of a whole answer."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for part in parts:
        match part:
            case Text(text):
                texts.append(text)
            case Reasoning(text):
                thoughts.append(text)
            case CallStart(_, call_id, name):
                calls.append(ToolCall(call_id, FunctionCall(name)))
            case CallArguments(index, text):
                calls[index].function.arguments += text
    content = "".join(texts) if texts or not (calls or thoughts) else None
    return ChatAnswer(content, "".join(thoughts) if thoughts else None, calls)
