"""Reasoning over HTTP: told from the answer, counted, bounded, and left out where not wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.model_front import ModelFront
from tests import waiting
from tests.server.running import bundled_front, running_server
from tests.server.scripted import Script, as_joined, hermes_front, joined, without_ids

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
END = "<|end|>"
THOUGHT = "<think>\nThey greet me.\n</think>\n\n"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    return hermes_front(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    """Serve a model that does not think."""
    with running_server(bundled_front()) as server:
        with waiting.PatientClient(base_url=server.url) as client:
            yield client
        server.wait_until_idle()


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 300, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def chunks_of(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "max_tokens": 300, **body, "stream": True}
    with http.stream("POST", CHAT, json=body) as reply:
        lines = list(reply.iter_lines())
    assert reply.status_code == 200, lines
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def both(http: httpx.Client, script: Script, text: str, **body: Any) -> dict[str, Any]:
    """The answer that the model is told to give, which is the same as a stream."""
    whole = as_joined(post(http, **body, seed=script.tell(text))["choices"][0])
    streamed = joined(chunks_of(http, **body, seed=script.tell(text)))
    assert without_ids(streamed) == without_ids(whole)
    return whole


def test_reasoning_is_told_from_the_answer(http: httpx.Client, script: Script) -> None:
    found = both(http, script, THOUGHT + "Hello!" + END)
    assert found["reasoning"].strip() == "They greet me."
    assert found["content"] == "Hello!"
    assert found["finish_reason"] == "stop"


def test_an_answer_without_reasoning_has_none(http: httpx.Client, script: Script) -> None:
    choice = post(http, seed=script.tell("Hello!" + END))["choices"][0]
    empty = {"refusal": None, "annotations": []}
    assert choice["message"] == {"role": "assistant", "content": "Hello!", **empty}


def test_a_call_after_reasoning(http: httpx.Client, script: Script) -> None:
    found = both(http, script, THOUGHT + CALL + END, tools=TOOLS, tool_choice="required")
    assert found["reasoning"].strip() == "They greet me."
    assert (found["content"], found["finish_reason"]) == (None, "tool_calls")
    assert [call["arguments"] for call in found["calls"]] == ["{}"]


def test_a_call_within_reasoning_is_none(http: httpx.Client, script: Script) -> None:
    call = '{"name": "f", "arguments": {}}'
    found = both(http, script, f"<think>Say {call}?</think>No.{END}", tools=TOOLS)
    assert (found["calls"], found["content"]) == ([], "No.")
    assert call in found["reasoning"]


def test_tokens_of_reasoning_are_counted(http: httpx.Client, script: Script) -> None:
    text = "<think>One two three.</think>Four." + END
    usage = post(http, seed=script.tell(text))["usage"]
    assert usage["completion_tokens"] == len(script.ids(text))
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert num_reasoning == len(script.ids("One two three."))
    body = {"stream_options": {"include_usage": True}, "seed": script.tell(text)}
    assert chunks_of(http, **body)[-1]["usage"] == usage


def test_reasoning_that_is_not_wanted_is_left_out(http: httpx.Client, script: Script) -> None:
    found = both(http, script, THOUGHT + "Hello!" + END, include_reasoning=False)
    assert (found["reasoning"], found["content"]) == ("", "Hello!")
    answer = post(http, include_reasoning=False, seed=script.tell(THOUGHT + "Hello!" + END))
    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal", "annotations"}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_reasoning_that_is_cut(http: httpx.Client, script: Script) -> None:
    found = both(http, script, THOUGHT + "Hello!" + END, max_tokens=4)
    assert found["content"] is None
    assert found["finish_reason"] == "length"
    assert "They greet me.".startswith(found["reasoning"].strip()) and found["reasoning"]


def test_stop_strings_do_not_match_in_reasoning(http: httpx.Client, script: Script) -> None:
    found = both(http, script, THOUGHT + "Hello, they said." + END, stop=["greet", "they"])
    assert found["reasoning"].strip() == "They greet me."
    assert found["content"] == "Hello, "


def test_a_format_begins_after_the_reasoning(http: httpx.Client, script: Script) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = both(http, script, THOUGHT + '{"a": true}' + END, response_format=asked)
    assert json.loads(found["content"]) == {"a": True}
    assert found["reasoning"].strip() == "They greet me."
    found = both(http, script, THOUGHT + "ab" + END, guided_regex="[a-c]+")
    assert (found["content"], found["reasoning"].strip()) == ("ab", "They greet me.")


@pytest.mark.parametrize("budget", [1, 5])
def test_a_budget_ends_the_reasoning(http: httpx.Client, script: Script, budget: int) -> None:
    """The model itself would think on. Behind a start marker that is a token of text, the library
    counts tokens of one byte late, so one token less is allowed."""
    num_told = max(budget - 1, 1)
    seed = script.tell("<think>" + " so" * num_told)
    answer = post(http, thinking_token_budget=budget, seed=seed, max_tokens=budget + 9)
    num_reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_reasoning == num_told
    message = answer["choices"][0]["message"]
    assert message["reasoning"] and message["content"]


def test_a_budget_needs_a_model_that_thinks(plain: httpx.Client) -> None:
    reply = plain.post(CHAT, json={"messages": MESSAGES, "thinking_token_budget": 5})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "thinking_token_budget"
    assert "does not think" in error["message"]


@pytest.mark.parametrize(
    "asked",
    [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}],
    ids=str,
)
def test_thinking_can_be_turned_off(
    http: httpx.Client, script: Script, asked: dict[str, Any]
) -> None:
    """The template closes it in the prompt, so the answer is text from its first token."""
    found = both(http, script, "Hello!" + END, **asked)
    assert (found["reasoning"], found["content"]) == ("", "Hello!")
    usual = post(http, max_tokens=1)["usage"]["prompt_tokens"]
    assert post(http, max_tokens=1, **asked)["usage"]["prompt_tokens"] > usual
    switched = {"reasoning_effort": "high"}
    assert post(http, max_tokens=1, **switched)["usage"]["prompt_tokens"] == usual


def test_a_switch_of_the_template_goes_before_the_effort(http: httpx.Client) -> None:
    usual = post(http, max_tokens=1)["usage"]["prompt_tokens"]
    body = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert post(http, max_tokens=1, **body)["usage"]["prompt_tokens"] == usual


def test_the_verbosity_goes_to_the_template(http: httpx.Client) -> None:
    """Fault: a field of the API is refused. A template that does not know it is left alone."""
    usual = post(http, max_tokens=1)["usage"]["prompt_tokens"]
    for fields in ({"verbosity": "low"}, {"chat_template_kwargs": {"verbosity": "low"}}):
        assert post(http, max_tokens=1, **fields)["usage"]["prompt_tokens"] > usual
    body = {"input": "hi", "max_output_tokens": 1}
    counts = [
        http.post("/v1/responses", json={**body, "text": text}).json()["usage"]["input_tokens"]
        for text in ({}, {"verbosity": "high"})
    ]
    assert counts[0] < counts[1]
    for path, fields in (
        (CHAT, {"messages": MESSAGES, "verbosity": "odd"}),
        ("/v1/responses", {"input": "hi", "text": {"verbosity": 5}}),
    ):
        reply = http.post(path, json=fields)
        assert reply.status_code == 400 and "verbosity" in reply.text, reply.text


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_of_earlier_turns_reaches_the_template(http: httpx.Client, name: str) -> None:
    """Under the name that the template reads, whichever the client used."""
    turn = {"role": "assistant", "content": "Hello!"}
    body = {"messages": [*MESSAGES, {**turn, name: "They greet."}, *MESSAGES]}
    shown = http.post("/tokenize", json={**body, "return_token_strs": True}).json()
    assert "<think>" in shown["token_strs"]


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none"},
        {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
        {"parallel_tool_calls": False},
        {"functions": [], "function_call": "none"},
        {"include_reasoning": False, "thinking_token_budget": -1},
    ],
    ids=str,
)
def test_what_asks_for_no_parts_changes_no_byte(plain: httpx.Client, body: dict[str, Any]) -> None:
    """The model does not think."""
    bodies: list[bytes] = []
    for more in ({}, body):
        asked = {"messages": MESSAGES, "seed": 1, "max_tokens": 12, "request_id": "same", **more}
        for stream in (True, False):
            reply = plain.post(CHAT, json={**asked, "stream": stream})
            assert reply.status_code == 200
            assert b"reasoning" not in reply.content
            start, end = reply.content.partition(b'"created":')[::2]
            bodies.append(start + end.partition(b",")[2])
    # later chunks name the second in which they were begun, too
    assert len(bodies[0]) == len(bodies[2]) and bodies[1] == bodies[3]


def test_an_unknown_parser_ends_the_start(tmp_path: Path) -> None:
    from quire import ConfigError
    from quire.server.generation.served_model import model_dialect

    front = hermes_front(tmp_path)
    with pytest.raises(ConfigError, match="no tool call parser 'hermess'"):
        model_dialect(front, "hermess")
    found = model_dialect(front)
    forced = model_dialect(front, "hermes")
    assert found is not None and forced is not None
    assert (forced.name, forced.open) == (found.name, found.open)
    with pytest.raises(ConfigError, match="no reasoning parser 'qwen'"):
        model_dialect(front, None, "qwen")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_reasoning_parser_names_the_markers(name: str) -> None:
    """The template of the model does not show that it thinks."""
    from quire.server.generation.served_model import model_dialect

    dialect = model_dialect(bundled_front(), None, name)
    assert dialect is not None and dialect.thinking == ("<think>", "</think>")
    found = model_dialect(bundled_front(), None, "openai_gptoss")
    assert found is not None and found.thinking is None
