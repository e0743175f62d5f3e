"""Tools for models whose template has no place for them: described in words, read as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from quire.engine.model_front import ModelFront
from quire.text.dialect.conversation import described
from quire.text.rendering import ChatTemplate, Renderer
from tests import waiting
from tests.server.running import RunningServer, bundled_front, running_server
from tests.server.scripted import Script, as_joined

CHAT = "/v1/chat/completions"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    },
}
CALL = '{"tool_calls": [{"name": "f", "arguments": {"a": true}}]}'
END = "<|end|>"
NO_SYSTEM = "{{ raise_exception('no system') if messages[0].role == 'system' }}"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def front_of(template: str) -> ModelFront:
    front = bundled_front()
    tokenizer = front.renderer.tokenizer
    assert tokenizer is not None
    own = ChatTemplate(template, tokenizer.special_tokens)
    return replace(front, renderer=Renderer(tokenizer, own, front.renderer.vocab_size))


@pytest.fixture(scope="module", params=["", NO_SYSTEM], ids=["system", "no system"])
def front(request: pytest.FixtureRequest) -> ModelFront:
    return front_of(request.param + TEMPLATE)


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = http.post(CHAT, json={"messages": MESSAGES, "tools": [TOOL], "max_tokens": 100, **body})
    assert reply.status_code == 200, reply.text
    return as_joined(reply.json()["choices"][0])


def prompt_of(http: httpx.Client, **body: Any) -> str:
    asked = {"messages": MESSAGES, "return_token_strs": True, **body}
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_the_prompt_describes_the_tools(http: httpx.Client) -> None:
    shown = prompt_of(http, tools=[TOOL])
    assert json.dumps(TOOL["function"]["parameters"]) in shown
    assert '"tool_calls"' in shown and "hi" in shown
    assert "tool_calls" not in prompt_of(http)


def test_calls_are_told_from_text(http: httpx.Client, script: Script) -> None:
    found = post(http, seed=script.tell(CALL + END))
    assert [(call["name"], call["arguments"]) for call in found["calls"]] == [("f", '{"a": true}')]
    assert (found["content"], found["finish_reason"]) == (None, "tool_calls")
    found = post(http, seed=script.tell('{"response": "A \\"word\\".\\n"}' + END))
    assert (found["content"], found["calls"]) == ('A "word".\n', [])


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_of_a_random_model_fit(http: httpx.Client, seed: int) -> None:
    found = post(http, tool_choice="required", parallel_tool_calls=False, seed=seed)
    if found["finish_reason"] == "tool_calls":
        (call,) = found["calls"]
        assert json.loads(call["arguments"])["a"] in (True, False)


def test_no_tool_means_text_as_it_is(http: httpx.Client, script: Script) -> None:
    found = post(http, tool_choice="none", seed=script.tell("Plain." + END))
    assert (found["content"], found["finish_reason"]) == ("Plain.", "stop")


def test_calls_and_results_of_earlier_turns_are_texts(http: httpx.Client, script: Script) -> None:
    function = {"name": "f", "arguments": '{"a": true}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    turns = [*MESSAGES, called, result]
    shown = prompt_of(http, messages=turns, tools=[TOOL])
    assert CALL in shown and "done" in shown and "None" not in shown
    found = post(http, messages=turns, seed=script.tell('{"response": "Yes."}' + END))
    assert found["content"] == "Yes."


CALLED_AND_DONE: list[dict[str, Any]] = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": true}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "done"},
]


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]}],
    ids=str,
)
def test_calls_of_earlier_turns_are_texts_whatever_tools_there_are(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    """Catches a handoff to an agent without tools that is refused, or loses the calls."""
    asked = {"messages": CALLED_AND_DONE, "max_tokens": 1, **fields}
    reply = http.post(CHAT, json=asked)
    assert reply.status_code == 200, reply.text
    tools = {"tools": fields["tools"]} if "tools" in fields else {}
    shown = prompt_of(http, messages=CALLED_AND_DONE, **tools)
    assert CALL in shown and "(f):" in shown and "done" in shown


def test_other_apis_send_such_turns_too(http: httpx.Client) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": tr'},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
    ]
    reply = http.post("/v1/responses", json={"input": items, "max_output_tokens": 16})
    assert reply.status_code == 200, reply.text
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": True}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
    ]
    reply = http.post("/v1/messages", json={"model": "bundled", "messages": turns, "max_tokens": 1})
    assert reply.status_code == 200, reply.text


THINKS = "{# <think> </think> #}" + TEMPLATE


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    """A model whose markers of thinking are several tokens each."""
    with running_server(front_of(THINKS)) as server:
        yield server
        server.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (
            "/v1/messages",
            {
                "thinking": {"type": "enabled", "budget_tokens": 3},
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            },
        ),
        (CHAT, {"thinking_token_budget": 3, "tools": [TOOL]}),
        (CHAT, {"thinking_token_budget": 0}),
        ("/v1/responses", {"thinking_token_budget": 3}),
    ],
    ids=str,
)
def test_a_budget_of_thinking_needs_no_marker_that_is_a_token(
    thinker: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    """Catches a refusal that names a field which the client never sent, and a budget that is not
    held."""
    asked = {"model": "bundled", "max_tokens": 40, **fields}
    asked |= {"input": "hi"} if "responses" in path else {"messages": MESSAGES}
    asked |= {"max_output_tokens": asked.pop("max_tokens")} if "responses" in path else {}
    with waiting.PatientClient(base_url=thinker.url) as http:
        reply = http.post(path, json=asked)
        assert reply.status_code == 200, reply.text
        budget = fields.get("thinking_token_budget")
        if path != CHAT:
            return
        with Script(thinker, front_of(THINKS)) as script:
            seed = script.tell("<think>" + " so" * budget + "</think>Yes." + END)
            asked = {**asked, "tools": None, "seed": seed}
            message = http.post(path, json=asked).json()["choices"][0]["message"]
            found = (message.get("reasoning") or "", message["content"])
            assert found == (" ".join(["so"] * budget), "Yes.")


@pytest.mark.parametrize(
    ("messages", "in_system", "roles"),
    [
        ([{"role": "user", "content": "q"}], True, ["system", "user"]),
        ([{"role": "user", "content": [{"type": "text", "text": "q"}]}], False, ["user"]),
        ([{"role": "developer", "content": "s"}, *MESSAGES], True, ["developer", "user"]),
        ([{"role": "assistant", "content": "a"}], False, ["user", "assistant"]),
        ([{"role": "system", "content": [{"type": "text", "text": "s"}]}], True, ["system"]),
    ],
    ids=str,
)
def test_where_tools_are_described(
    messages: list[dict[str, Any]], in_system: bool, roles: list[str]
) -> None:
    found = described(messages, "Call f.", in_system=in_system)
    assert [message["role"] for message in found] == roles
    assert "Call f." in json.dumps(found)
    assert messages != found
