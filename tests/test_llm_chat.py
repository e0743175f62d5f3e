"""`LLM.chat` as its users see it, with the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic
import pytest

from quire import (
    LLM,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.outputs import ChatAnswer
from quire.text.dialect import find_dialect

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(quiet=True, num_kv_blocks=256, max_model_len=512) as engine:
        yield engine


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hello!"}]
    (one,) = llm.chat(conversation, GREEDY)
    many = llm.chat([conversation, conversation], GREEDY)
    assert [output.outputs[0].text for output in many] == [one.outputs[0].text] * 2
    assert one.prompt != "Hello!"


@pytest.mark.parametrize("strict", [True, False])
def test_a_misspelt_type_is_refused(llm: LLM, strict: bool) -> None:
    """Turns red when a schema that says `objekt` lets any value through."""
    schema = {"type": "array", "items": {"type": ["string", "nul"]}}
    held = StructuredOutputsParams(json=schema, strict=strict)
    params = SamplingParams(max_tokens=4, structured_outputs=held)
    with pytest.raises(RequestError, match=r'\$\.items\.type \(\["string", "nul"\] .* null, array'):
        llm.generate("Hello!", params)


def test_calls_of_a_chat_are_told_apart(llm: LLM) -> None:
    """Catches calls that users of `chat` would have to find in the text, and a stop token or a stop
    string that becomes part of an answer."""
    name = {"type": "string", "maxLength": 4}
    schema = {"type": "object", "properties": {"name": name}, "required": ["name"]}
    tools = [{"type": "function", "function": {"name": "find", "parameters": schema}}]
    renderer = llm.engine.renderer
    dialect = find_dialect(renderer.chat_template, renderer.tokenizer)
    marker = dialect.tokens.ids["<|tool_call|>"]
    text = '"{\\"name\\": \\"find\\", \\"arguments\\": {\\"name\\": \\"" /[a-z]{1,4}/ "\\"}}"'
    held = StructuredOutputsParams(grammar=f"start: <[{marker}]> {text}")
    params = [
        SamplingParams(temperature=1, seed=1, max_tokens=60, structured_outputs=held),
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=12, stop=["e"]),
    ]
    conversation = [{"role": "user", "content": "Hello!"}]
    called, free, stopped = (
        output.outputs[0] for output in llm.chat([conversation] * 3, params, tools=tools)
    )
    assert called.answer is not None
    (call,) = called.answer.tool_calls
    assert (call.function.name, call.type, called.answer.content) == ("find", "function", None)
    assert len(json.loads(call.function.arguments)["name"]) <= 4
    assert call.id.startswith("call_")
    for each in (free, stopped):
        assert each.answer == ChatAnswer(each.text)
    assert stopped.stop_reason == "e"
    (plain,) = llm.chat(conversation, params[1])
    assert plain.outputs[0].answer == ChatAnswer(plain.outputs[0].text)
    (generated,) = llm.generate("Hello!", params[1])
    assert generated.outputs[0].answer is None
    with pytest.raises(RequestError):
        llm.chat([{"role": "user", "content": "a", "tool_calls": 3}, 5], params[1])  # type: ignore[list-item]


@dataclass
class Said:
    role: str
    content: str


class Sent(pydantic.BaseModel):
    role: str = "user"
    content: str | None = None
    tool_calls: Sequence[Any] | None = None


def test_messages_of_a_chat_may_be_objects(llm: LLM) -> None:
    """Fault: answers are lost after they were computed; a malformed conversation of a list loses
    all others."""
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    function = {"name": "find", "arguments": "{}"}
    called = Sent(role="assistant", tool_calls=({"id": "a", "function": function},))
    plain = [Said("user", "a"), called, {"role": "tool", "tool_call_id": "a", "content": "b"}]
    chats: list[Any] = [
        [{"role": "user", "content": "Hello!"}],
        [Said("user", "Hello!")],
        (Sent(content="Hello!"),),
        [Said("user", "a"), Sent(role="assistant", content="x", tool_calls=["oops"])],
        None,
        plain,
    ]
    outputs = llm.chat(chats, GREEDY, tools=tools)
    assert [bool(output.error) for output in outputs] == [False] * 3 + [True] * 2 + [False]
    assert "messages[1].tool_calls[0]" in str(outputs[3].error)
    answers = [each.outputs[0].answer for each in outputs if not each.error]
    assert answers[0] is not None and answers[0].content
    for failed in outputs[3:5]:
        (sample,) = failed.outputs
        assert (sample.finish_reason, sample.error) == ("error", failed.error)
        assert sample.answer == ChatAnswer(None)
    assert answers[1:3] == answers[:1] * 2 and answers[3] is not None


def test_a_chat_template_can_be_given() -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    with LLM(quiet=True, num_kv_blocks=64, chat_template=template) as engine:
        (output,) = engine.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt == "[user] hi"


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user", "content": "hi"}])
def test_a_broken_conversation_raises(llm: LLM, messages) -> None:
    """One conversation is a single prompt: its error must not hide in an output."""
    with pytest.raises(RequestError, match="messages"):
        llm.chat(messages)
