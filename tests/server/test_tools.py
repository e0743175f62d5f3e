"""Tool calls over HTTP, whole and as a stream: the calls that were asked for come, and can be
parsed."""

from __future__ import annotations

import json
import threading
from typing import Any, NamedTuple

import httpx
import jsonschema
import pytest

from quire.engine.model_front import ModelFront
from quire.protocol.request import EngineRequest
from quire.server.generation import prompts
from quire.server.generation.parsed import AnswerForm
from tests.pairs import LAWS_BY_PAIRS
from tests.server.running import bundled_front
from tests.server.scripted import Script, as_joined, hermes_front, joined, without_ids

pytestmark = LAWS_BY_PAIRS

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get-time"}}
TOOLS = [WEATHER, TIME]
END = "<|end|>"


class Form(NamedTuple):
    """call, time_call: calls of the two tools in the model's form, the second behind the first."""

    call: str
    time_call: str
    marker: str


WEATHER_CALL = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
EMPTY_CALL = '{"name": "get-time", "arguments": {}}'
FORMS = {
    "hermes": Form(
        f"<tool_call>\n{WEATHER_CALL}\n</tool_call>",
        f"\n<tool_call>\n{EMPTY_CALL}\n</tool_call>",
        "<tool_call>",
    ),
    "bundled": Form(f"<|tool_call|>{WEATHER_CALL}", f"<|tool_call|>{EMPTY_CALL}", "<|tool_call|>"),
}


@pytest.fixture(scope="module", params=FORMS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def form(name: str) -> Form:
    return FORMS[name]


@pytest.fixture(scope="module")
def front(name: str, tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    if name == "bundled":
        return bundled_front()
    return hermes_front(tmp_path_factory.mktemp(name))


def post(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """The one choice of an answer."""
    reply = http.post(CHAT, json={"messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, **body})
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice


def chunks_of(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, **body, "stream": True}
    with http.stream("POST", CHAT, json=body) as reply:
        lines = list(reply.iter_lines())
    assert reply.status_code == 200, lines
    assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def both(http: httpx.Client, script: Script, text: str, **body: Any) -> dict[str, Any]:
    """The answer that the model is told to give, which is the same as a stream."""
    whole = without_ids(as_joined(post(http, **body, seed=script.tell(text))))
    streamed = joined(chunks_of(http, **body, seed=script.tell(text)))
    assert without_ids(streamed) == whole
    return whole


def check_calls(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        tool = next(t["function"] for t in TOOLS if t["function"]["name"] == call["name"])
        schema = tool.get("parameters", {"type": "object"})
        jsonschema.validate(json.loads(call["arguments"]), schema)


@pytest.mark.parametrize("most", [10, 2048])
def test_large_grammars_are_made_in_threads(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Fault: the schemas of one request hold up all others. Small ones are not worth a thread."""
    names: list[str] = []
    held = AnswerForm.held

    def seen(form: AnswerForm, request: EngineRequest) -> EngineRequest:
        names.append(threading.current_thread().name)
        return held(form, request)

    monkeypatch.setattr(AnswerForm, "held", seen)
    monkeypatch.setattr(prompts, "SHORT_CHARS", most)
    post(http, max_tokens=1)
    assert [name == "render" for name in names] == [most == 10]


# --- a random model ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_required_calls_can_be_parsed(http: httpx.Client, seed: int) -> None:
    body: dict[str, Any] = {"tool_choice": "required", "seed": seed, "tools": [WEATHER]}
    choice = as_joined(post(http, **body))
    streamed = joined(chunks_of(http, **body))
    assert without_ids(streamed) == without_ids(choice)
    if choice["finish_reason"] == "length":
        return
    assert choice["finish_reason"] == "tool_calls"
    assert choice["content"] is None
    assert choice["calls"]
    check_calls(choice["calls"])


@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_is_called_once(http: httpx.Client, seed: int) -> None:
    choice_of = {"type": "function", "function": {"name": "get_weather"}}
    choice = as_joined(post(http, tool_choice=choice_of, seed=seed, reasoning_effort="none"))
    assert [call["name"] for call in choice["calls"]] == ["get_weather"]
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        check_calls(choice["calls"])


def test_allowed_tools_bound_the_names(http: httpx.Client) -> None:
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "get_weather"}}],
        },
    }
    for seed in range(4):
        asked = {"tool_choice": allowed, "parallel_tool_calls": False, "reasoning_effort": "none"}
        choice = as_joined(post(http, **asked, seed=seed))
        assert [call["name"] for call in choice["calls"]] == ["get_weather"]


# --- a model that is told what to say ---------------------------------------------------------


def test_calls_alone(http: httpx.Client, script: Script, form: Form) -> None:
    found = both(http, script, form.call + form.time_call + END)
    assert found["content"] is None
    assert found["calls"] == [
        {"name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"name": "get-time", "arguments": "{}"},
    ]
    assert found["finish_reason"] == "tool_calls"


def test_text_alone(http: httpx.Client, script: Script) -> None:
    found = both(http, script, "It is warm." + END)
    assert (found["content"], found["calls"]) == ("It is warm.", [])
    assert found["finish_reason"] == "stop"


def test_no_text_at_all_is_an_empty_one(http: httpx.Client, script: Script) -> None:
    choice = post(http, seed=script.tell(END))
    assert choice["message"]["content"] == ""
    assert "tool_calls" not in choice["message"]


def test_text_before_a_call_is_kept(http: httpx.Client, script: Script, form: Form) -> None:
    found = both(http, script, "Let me see." + form.call + END)
    assert found["content"] == "Let me see."
    assert [call["name"] for call in found["calls"]] == ["get_weather"]
    assert found["finish_reason"] == "tool_calls"


def test_one_call_where_several_are_not_wanted(
    http: httpx.Client, script: Script, form: Form
) -> None:
    found = both(http, script, form.call + END, parallel_tool_calls=False)
    assert [call["name"] for call in found["calls"]] == ["get_weather"]
    body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
    reply = http.post(CHAT, json={**body, "seed": script.tell(form.call + form.time_call + END)})
    assert reply.status_code == 500, "the grammar lets no second call begin"


def test_no_tool_is_called_where_none_may_be(
    http: httpx.Client, script: Script, form: Form
) -> None:
    found = both(http, script, "No." + END, tool_choice="none")
    assert (found["content"], found["calls"], found["finish_reason"]) == ("No.", [], "stop")
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}
    assert http.post(CHAT, json={**body, "seed": script.tell(form.call)}).status_code == 500


@pytest.mark.parametrize("num_tokens", [1, 4, 9, 14])
def test_a_call_that_is_cut_says_length(
    http: httpx.Client, script: Script, form: Form, num_tokens: int
) -> None:
    found = both(http, script, form.call + END, max_tokens=num_tokens)
    assert found["finish_reason"] == "length"
    assert not found["content"]
    for call in found["calls"]:
        assert '{"city": "Rome"}'.startswith(call["arguments"])


def test_the_second_call_that_is_cut_says_length(
    http: httpx.Client, script: Script, form: Form
) -> None:
    length = len(script.ids(form.call)) + 2
    found = both(http, script, form.call + form.time_call + END, max_tokens=length)
    assert found["finish_reason"] == "length"
    assert found["calls"][0]["arguments"] == '{"city": "Rome"}'


def test_stop_strings_match_in_the_text_alone(
    http: httpx.Client, script: Script, form: Form
) -> None:
    """An argument may hold one, and so may the name of a tool."""
    found = both(http, script, "Hm." + form.call + END, stop=["Rome", "weather", "arg"])
    assert [call["arguments"] for call in found["calls"]] == ['{"city": "Rome"}']
    assert found["finish_reason"] == "tool_calls"


def test_a_stop_string_ends_the_text(http: httpx.Client, script: Script, form: Form) -> None:
    body = {"stop": ["me s"], "seed": script.tell("Let me see." + form.call + END)}
    choice = post(http, **body)
    assert choice["message"]["content"] == "Let "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "me s")
    body["seed"] = script.tell("Let me see." + form.call + END)
    assert joined(chunks_of(http, **body))["content"] == "Let "


def test_the_beginning_of_a_stop_string_before_a_call_is_text(
    http: httpx.Client, script: Script, form: Form
) -> None:
    found = both(http, script, "Let me" + form.call + END, stop=["me see"])
    assert found["content"] == "Let me"
    assert len(found["calls"]) == 1


def test_a_stop_string_that_is_a_token_ends_an_answer(
    http: httpx.Client, script: Script, form: Form
) -> None:
    for included in (False, True):
        body: dict[str, Any] = {"stop": ["<|user|>"], "include_stop_str_in_output": included}
        choice = post(http, **body, seed=script.tell("Hm." + "<|user|>"))
        assert choice["stop_reason"] == "<|user|>"
        assert choice["message"]["content"] == ("Hm.<|user|>" if included else "Hm.")
        choice = post(http, **body, seed=script.tell(form.call + "<|user|>"))
        assert choice["finish_reason"] == "tool_calls"


def test_beams_end_in_calls_that_can_be_parsed(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "n": 2}
    beams = {"use_beam_search": True, "max_tokens": 90, "parallel_tool_calls": False}
    reply = http.post(CHAT, json={**body, **beams})
    assert reply.status_code == 200, reply.text
    for choice in map(as_joined, reply.json()["choices"]):
        if choice["finish_reason"] == "tool_calls":
            check_calls(choice["calls"])


def test_samples_have_calls_of_their_own(http: httpx.Client, script: Script, form: Form) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "n": 2, "seed": script.tell(form.call + END)}
    choices = http.post(CHAT, json=body).json()["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    body["seed"] = script.tell(form.call + END)
    chunks = chunks_of(http, **body)
    for index in range(2):
        mine = [
            {"choices": [choice for choice in chunk["choices"] if choice["index"] == index]}
            for chunk in chunks
        ]
        assert joined(mine)["calls"][0]["arguments"] == '{"city": "Rome"}'


def test_log_probabilities_and_token_ids_are_those_of_all_tokens(
    http: httpx.Client, script: Script, form: Form
) -> None:
    text = "Let me see." + form.call + END
    asked: dict[str, Any] = {"logprobs": True, "return_token_ids": True}
    choice = post(http, **asked, seed=script.tell(text))
    assert choice["token_ids"] == script.ids(text)
    assert len(choice["logprobs"]["content"]) == len(script.ids(text))
    chunks = chunks_of(http, **asked, seed=script.tell(text))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [i for choice in choices for i in choice["token_ids"]] == script.ids(text)
    entries = [e for c in choices for e in (c["logprobs"] or {}).get("content", [])]
    assert len(entries) == len(script.ids(text))


def test_a_stream_ends_with_its_usage(http: httpx.Client, script: Script, form: Form) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(http, stream_options=options, seed=script.tell(form.call + END))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(script.ids(form.call + END))
    assert all("usage" in chunk for chunk in chunks)
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_format_beside_tools_means_calls_or_that(
    http: httpx.Client, script: Script, form: Form
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = both(http, script, form.call + END, response_format=asked)
    assert found["finish_reason"] == "tool_calls"
    found = both(http, script, '{"a": true}' + END, response_format=asked)
    assert (found["content"], found["finish_reason"]) == ('{"a": true}', "stop")
    body = {"messages": MESSAGES, "tools": TOOLS, "response_format": asked}
    assert http.post(CHAT, json={**body, "seed": script.tell("So" + END)}).status_code == 500


WEATHER_NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    "given",
    [
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        {
            "tool_choice": WEATHER_NAMED,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"uniqueItems": True}},
            },
        },
        {"tool_choice": "required", "guided_regex": "a+"},
        {"tool_choice": WEATHER_NAMED, "structured_outputs": {"choice": ["yes", "no"]}},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [WEATHER_NAMED]},
            },
            "response_format": {"type": "json_object"},
        },
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_format_beside_a_call_that_must_come_is_about_no_text(
    http: httpx.Client, script: Script, form: Form, given: dict[str, Any]
) -> None:
    """Fault: instructor sends both always, and got a 400."""
    found = both(http, script, form.call + END, **given)
    assert [call["name"] for call in found["calls"]] == ["get_weather"]
    body = {"messages": MESSAGES, "tools": TOOLS, **given, "seed": script.tell('{"a": 1}' + END)}
    assert http.post(CHAT, json=body).status_code == 500, "the call must come"


def test_tools_stand_in_the_prompt_and_are_counted(http: httpx.Client, script: Script) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS}
    answer = http.post(CHAT, json={**body, "seed": script.tell("No." + END)}).json()
    counted = http.post("/tokenize", json=body).json()
    assert counted["count"] == answer["usage"]["prompt_tokens"]
    bare = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert bare["count"] < counted["count"]


def test_a_conversation_of_calls_and_results_goes_on(
    http: httpx.Client, script: Script, form: Form
) -> None:
    """The client sends back the server's message unchanged."""
    message = post(http, seed=script.tell(form.call + END))["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "18 °C"}
    turns = [*MESSAGES, message, result]
    found = both(http, script, "Warm." + END, messages=turns)
    assert found["content"] == "Warm."
    shown = http.post("/tokenize", json={"messages": turns, "return_token_strs": True}).json()
    assert form.marker in shown["token_strs"]


# --- what cannot be asked for -----------------------------------------------------------------


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is missing"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "tools[0].type is 'custom'"),
    ({"tools": [tool(), tool(name=None)]}, "tools", "tools[1].function.name is missing"),
    ({"tools": [tool(name="")]}, "tools", "tools[0] has the name ''"),
    ({"tools": [tool(name="a b")]}, "tools", "tools[0] has the name 'a b'"),
    ({"tools": [tool(), tool()]}, "tools", "tools[1] has the name 'f' of a tool before it"),
    ({"tools": [tool(parameters=[])]}, "tools", "tools[0].function.parameters is '[]'"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools", "parameters.type is 'string'"),
    ({"tools": [tool(parameters={"properties": []})]}, "tools", "parameters.properties is '[]'"),
    ({"tools": [tool(strict="yes")]}, "tools", "tools[0].function.strict is 'yes'"),
    ({"tools": [tool(description=1)]}, "tools", "tools[0].function.description is '1'"),
    (
        {"tools": [tool(strict=True, parameters={"properties": {"a": {"not": {}}}})]},
        "tools",
        "$.properties.a.not",
    ),
    ({"tools": "f"}, "tools", "tools: expected array"),
    ({"tools": [1]}, "tools", "tools[0]: expected object"),
    ({"tools": None, "tool_choice": "auto"}, "tool_choice", "there are no tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": "any"}, "tool_choice", "tool_choice is 'any'"),
    ({"tool_choice": named("absent")}, "tool_choice", "names 'absent', which is none of"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice is"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools is missing"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [named("no")]}}},
        "tool_choice",
        "names 'no'",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
        "tool_choice",
        "mode is 'x'",
    ),
    (
        {"tool_choice": "required", "response_format": {"type": "xml"}},
        "response_format",
        "response_format.type is 'xml'",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "the older form of tools"),
    ({"function_call": {"name": "f"}}, "function_call", "the older form of tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "expected bool"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", "is -2"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_refusal_names_the_field(
    http: httpx.Client, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    base: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 2}
    reply = http.post(CHAT, json={**base, **body, "stream": stream})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert words in error["message"]
    assert error["param"] == param
