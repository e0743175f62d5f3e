"""Structured output over HTTP: every field that asks for it, whole and as a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from quire.protocol.grammar import StructuredOutputsParams
from quire.server.generation.parsed import AnswerForm
from quire.server.generation.prompts import SHORT_CHARS
from quire.server.openai.structured import num_schema_chars
from quire.text.dialect import Tool
from quire.text.dialect.families import DIALECTS
from tests.dialect.models import tokenizer
from tests.pairs import BY_PAIRS
from tests.server.running import MODEL, RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "maximum": 9}},
    "required": ["color"],
    "additionalProperties": False,
}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
}
CHOICES = ["yes", "no (never)"]


def text_of(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """The answer, which is the same as a stream."""
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    body = {**base, "seed": 3, "max_tokens": 120, **body}
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    whole = choice["message"]["content"] if path == CHAT else choice["text"]
    assert choice["finish_reason"] == "stop"
    pieces: list[str] = []
    with http.stream("POST", path, json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                pieces.append(
                    choice["delta"].get("content", "") if path == CHAT else choice["text"]
                )
    assert "".join(pieces) == whole
    return whole


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": JSON_SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_schemas(http: httpx.Client, path: str, asked: dict[str, Any]) -> None:
    value = json.loads(text_of(http, path, asked))
    assert value["color"] in ("red", "blue")
    assert value.get("count", 0) <= 9


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ({"guided_choice": CHOICES}, CHOICES),
        ({"structured_outputs": {"choice": CHOICES}, "ignore_eos": True}, CHOICES),
        ({"structured_outputs": {"choice": CHOICES}, "min_tokens": 50}, CHOICES),
        ({"guided_regex": "a{3}b"}, ["aaab"]),
        ({"guided_grammar": 'root ::= "x" "y"'}, ["xy"]),
        ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, ["xy"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_texts(http: httpx.Client, path: str, asked: dict[str, Any], texts: list[str]) -> None:
    assert text_of(http, path, asked) in texts


def test_a_json_object_is_one(http: httpx.Client) -> None:
    """Whole or cut by its length, the text begins one."""
    reply = http.post(
        CHAT,
        json={
            "messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 30,
            "logit_bias": {}, "seed": 1,
        },
    )  # fmt: skip
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])


def test_samples_and_log_probabilities(http: httpx.Client) -> None:
    body = {
        "prompt": "hi", "guided_choice": ["a", "b", "c"], "n": 4, "logprobs": 2, "seed": 1,
    }  # fmt: skip
    choices = http.post(TEXT, json=body).json()["choices"]
    assert {choice["text"] for choice in choices} <= {"a", "b", "c"}
    assert len({choice["text"] for choice in choices}) > 1
    assert all(choice["logprobs"]["tokens"] for choice in choices)


def test_stop_strings_end_earlier(http: httpx.Client) -> None:
    reply = http.post(TEXT, json={"prompt": "hi", "guided_regex": "abc", "stop": ["b"]})
    assert reply.json()["choices"][0]["text"] == "a"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_refusal_is_a_status_and_costs_no_other_request(
    http: httpx.Client, path: str, stream: bool
) -> None:
    """Also where it shows only when the grammar is compiled, and that takes too long."""
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": ["hi", "you"]}
    for schema, words in (
        ({"type": "integer", "multipleOf": 999983}, "to compile"),
        ({"type": "strin"}, '$.type ("strin" is no type'),
        ({"properties": {"a": {"not": {}}}}, "$.properties.a.not"),
    ):
        reply = http.post(path, json={**base, "guided_json": schema, "stream": stream})
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["error"]["message"]
    reply = http.post(path, json={**base, "max_tokens": 2})
    assert reply.status_code == 200


BAD: dict[str, Any] = {"type": "strin"}


@BY_PAIRS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "asked",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": BAD, "strict": True},
            }
        },
        {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
        {"structured_outputs": {"json": BAD, "strict": False}},
        {"structured_outputs": {"json": BAD}},
        {"structured_outputs": {"regex": "("}},
        {"guided_regex": "("},
        {"guided_grammar": "start: other"},
        {"guided_json": {"properties": {"a": {"not": {}}}}},
    ],
    ids=str,
)
def test_a_refusal_of_the_compiler_names_the_field(
    http: httpx.Client, path: str, asked: dict[str, Any], stream: bool
) -> None:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": ["hi", "you"]}
    reply = http.post(path, json={**base, **asked, "stream": stream})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == next(iter(asked))


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
@pytest.mark.parametrize("is_strict", [False, True], ids=["lenient", "strict"])
def test_an_odd_type_of_a_tool_is_refused_only_where_it_is_strict(
    http: httpx.Client, choice: str, is_strict: bool
) -> None:
    """Turns red when a tool that nothing is made of refuses a chat, or a strict one is not held."""
    function = {"name": "f", "parameters": {"properties": {"a": BAD}}, "strict": is_strict}
    body = {"messages": MESSAGES, "max_tokens": 2, "tool_choice": choice}
    reply = http.post(CHAT, json={**body, "tools": [{"type": "function", "function": function}]})
    if is_strict and choice != "none":
        assert reply.status_code == 400
        message = reply.json()["error"]["message"]
        assert 'tools[0].function.parameters has $.properties.a.type ("strin" is' in message
    else:
        assert reply.status_code == 200, reply.text


def test_a_format_beside_a_lenient_tool_has_no_odd_type(http: httpx.Client) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": BAD}}}
    tool = {"type": "function", "function": function}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}
    body = {"messages": MESSAGES, "max_tokens": 2, "tools": [tool]}
    assert http.post(CHAT, json=body).status_code == 200
    reply = http.post(CHAT, json={**body, "response_format": form})
    assert reply.status_code == 400
    assert '$.type ("strin" is no type: use one of string' in reply.text.replace("\\", "")
    form = {"format": {"type": "json_schema", "name": "a", "schema": BAD}}
    reply = http.post("/v1/responses", json={"input": "hi", "text": form})
    assert reply.status_code == 400
    assert "$.type" in reply.text


def test_a_fault_that_is_not_of_the_grammar_is_not_told_as_one(http: httpx.Client) -> None:
    body = {"prompt": "hi", "guided_regex": "abc", "max_tokens": 600}
    error = http.post(TEXT, json=body).json()["error"]
    assert error["param"] == "max_tokens"


@pytest.mark.parametrize(
    "schema",
    [
        {
            "x-quire-kept": 1,
            "properties": {"a": {"oneOf": [{}]}, "b": {"$ref": "#/properties/a/oneOf/0"}},
        },
        {"properties": {"a": {"type": "integer", "multipleOf": 10**400}}},
    ],
    ids=["kept", "huge"],
)
def test_odd_lenient_schemas_are_held_as_far_as_they_can_be(
    http: httpx.Client, schema: Any
) -> None:
    lenient = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": MESSAGES, "max_tokens": 2, "response_format": lenient}
    reply = http.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("schema", "is_short"),
    [
        (SCHEMA, True),
        (json.dumps(SCHEMA), True),
        ({"patternProperties": {"^a": {}, "b$": {}}}, False),
        ({"items": {"oneOf": [{"const": 1}, {"const": 2}]}}, False),
        ('{"\\u006fneOf": [{"const": 1}, {"const": 2}]}', False),
        ({"pattern": "(?i)^[a-z]+$"}, False),
    ],
    ids=str,
)
def test_the_event_loop_reads_short_schemas_alone(schema: Any, is_short: bool) -> None:
    """Turns red when a schema of a few hundred characters stops all streams for a while."""
    asked = StructuredOutputsParams(json=schema)
    assert (num_schema_chars(asked, None) <= SHORT_CHARS) == is_short
    form = AnswerForm(DIALECTS["hermes"], tokenizer(), (Tool("f", json.loads(json.dumps(schema))),))
    assert isinstance(schema, str) or (num_schema_chars(None, form) <= SHORT_CHARS) == is_short


def test_a_timeline_lists_what_a_lenient_schema_drops(http: httpx.Client) -> None:
    schema = {"properties": {"a": {"type": "string", "format": "path"}}, "uniqueItems": True}
    lenient = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": MESSAGES, "max_tokens": 2, "return_timeline": True}
    shown = http.post(CHAT, json={**body, "response_format": lenient}).json()["timeline"]
    assert shown["dropped_keywords"] == ["$.uniqueItems", "$.properties.a.format ('path')"]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    shown = http.post(CHAT, json={**body, "tools": [tool]}).json()["timeline"]
    assert shown["dropped_keywords"][0] == "f: $.uniqueItems"
    assert "dropped_keywords" not in http.post(CHAT, json=body).json()["timeline"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": JSON_SCHEMA, "guided_choice": ["a"]}, "response_format"),
        (
            {"response_format": {**JSON_SCHEMA, "json_schema": {"schema": {}, "strict": "false"}}},
            "response_format",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_names_the_field(http: httpx.Client, asked: dict[str, Any], param: str) -> None:
    error = http.post(TEXT, json={"prompt": "hi", **asked})
    assert error.status_code == 400
    assert param in (error.json()["error"]["param"] or error.json()["error"]["message"])


def test_a_switch_that_is_off_asks_for_nothing(http: httpx.Client) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "guided_json_object": False}
    assert http.post(TEXT, json=body).status_code == 200


class Answer(BaseModel):
    color: bool
    sizes: list[bool]


def test_the_openai_client_parses(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for seed in range(3):
            found = client.chat.completions.parse(
                model=MODEL, messages=MESSAGES, response_format=Answer, seed=seed,  # type: ignore[arg-type]
            )  # fmt: skip
            parsed = found.choices[0].message.parsed
            if found.choices[0].finish_reason == "stop":
                assert isinstance(parsed, Answer)
        server.wait_until_idle()


def test_beams_find_what_is_allowed(http: httpx.Client) -> None:
    body = {"prompt": "hi", "use_beam_search": True, "n": 2, "guided_choice": ["abc", "xyz", "q"]}
    reply = http.post(TEXT, json={**body, "max_tokens": 20})
    assert reply.status_code == 200, reply.text
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert len(texts) == 2  # perhaps two spellings of one text
    assert set(texts) <= {"abc", "xyz", "q"}
