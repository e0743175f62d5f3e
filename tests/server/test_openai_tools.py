"""The official client with tools: its helpers' parsing, and the loop that agents run."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from quire.engine.model_front import ModelFront
from tests.server.running import MODEL
from tests.server.scripted import Script, hermes_front

MESSAGES: Any = [{"role": "user", "content": "How warm is it in Rome?"}]
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
END = "<|end|>"


class Weather(BaseModel):
    """The weather of a place."""

    city: Literal["Rome", "Oslo"]
    days: int


class Answer(BaseModel):
    degrees: int


TOOLS: Any = [openai.pydantic_function_tool(Weather)]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    return hermes_front(tmp_path_factory.mktemp("hermes"))


def test_parse_gives_the_arguments_as_objects(client: openai.OpenAI, script: Script) -> None:
    found = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=TOOLS, seed=script.tell(CALL + END)
    )
    (choice,) = found.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None and choice.message.parsed is None
    (call,) = choice.message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Rome", days=2)


def test_parse_gives_a_format_or_calls(client: openai.OpenAI, script: Script) -> None:
    """The client sends both, as agents do."""
    asked: dict[str, Any] = {"tools": TOOLS, "response_format": Answer, "model": MODEL}
    for text in ('{"degrees": 18}', CALL):
        found = client.chat.completions.parse(
            **asked, messages=MESSAGES, seed=script.tell(text + END)
        )
        message = found.choices[0].message
        if text == CALL:
            (call,) = message.tool_calls or ()
            assert call.function.parsed_arguments == Weather(city="Rome", days=2)
        else:
            assert message.parsed == Answer(degrees=18)


def test_the_stream_helper_follows_calls(client: openai.OpenAI, script: Script) -> None:
    seed = script.tell("Let me see." + CALL + END)
    kinds: list[str] = []
    arguments = ""
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=TOOLS, seed=seed
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
            if event.type == "tool_calls.function.arguments.done":
                assert event.parsed_arguments == Weather(city="Rome", days=2)
        final = stream.get_final_completion()
    assert json.loads(arguments) == {"city": "Rome", "days": 2}
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert kinds.count("content.done") == 1
    message = final.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    assert message.tool_calls and message.tool_calls[0].id


def test_the_stream_helper_follows_reasoning(client: openai.OpenAI, script: Script) -> None:
    """Under both names, which the client keeps as fields that it does not know."""
    seed = script.tell("<think>Rome is warm.</think>Warm." + END)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, seed=seed) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Warm."
    extra = message.model_extra or {}
    assert extra["reasoning"] == extra["reasoning_content"] == "Rome is warm."


def test_a_loop_of_calls_and_results(client: openai.OpenAI, script: Script) -> None:
    """The client sends back its objects unchanged."""
    messages: list[Any] = list(MESSAGES)
    for text in (CALL, "<think>Now I know.</think>18 degrees."):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, seed=script.tell(text + END)
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            assert call.type == "function"
            Weather.model_validate_json(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "18"})
    assert [m["role"] if isinstance(m, dict) else m.role for m in messages] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert messages[-1].content == "18 degrees."


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_of_a_random_model_fit(client: openai.OpenAI, seed: int) -> None:
    found = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", seed=seed,
        parallel_tool_calls=False, max_tokens=60, extra_body={"thinking_token_budget": 4},
    )  # fmt: skip
    for call in found.choices[0].message.tool_calls or ():
        assert isinstance(call.function.parsed_arguments, Weather)


def test_refusals_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "absent"}},
        )  # fmt: skip
    assert found.value.param == "tool_choice"
