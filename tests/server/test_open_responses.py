"""Compliance with Open Responses (openresponses.org, 2026-04-24): its public cases that are of
text. What comes has the form of the specification, whose schemas are written down here anew."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from quire.engine.model_front import ModelFront
from tests.server.responses import last_prompt
from tests.server.running import MODEL, RunningServer
from tests.server.scripted import Script, hermes_front
from tests.server.socket_client import SocketClient

END = "<|end|>"
ROUTE = "/v1/responses"
Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def record(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    """An object with fields that are always there, and some that may be."""
    return {
        "type": "object",
        "required": sorted(required),
        "properties": {**required, **(optional or {})},
    }


def one(*values: str) -> Schema:
    return {"enum": list(values)}


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def maybe(schema: Schema) -> Schema:
    return either(schema, {"type": "null"})


STATUS = one("in_progress", "completed", "incomplete")
TOP = record(token=STRING, logprob=NUMBER, bytes=listed(INTEGER))
LOGPROB = record(token=STRING, logprob=NUMBER, bytes=listed(INTEGER), top_logprobs=listed(TOP))
OUTPUT_TEXT = record(
    {"logprobs": listed(LOGPROB)}, type=one("output_text"), text=STRING, annotations=listed({})
)
REASONING_TEXT = record(type=one("reasoning_text"), text=STRING)
INPUT_TEXT = record(type=one("input_text"), text=STRING)
PART = either(INPUT_TEXT, OUTPUT_TEXT, REASONING_TEXT)
MESSAGE = record(
    {"phase": one("commentary", "final_answer")},
    type=one("message"), id=STRING, status=STATUS, content=listed(PART),
    role=one("user", "assistant", "system", "developer"),
)  # fmt: skip
CALL = record(
    type=one("function_call"), id=STRING, call_id=STRING, name=STRING, arguments=STRING,
    status=STATUS,
)  # fmt: skip
REASONING = record(
    {"content": listed(PART), "encrypted_content": STRING},
    type=one("reasoning"), id=STRING, summary=listed(PART),
)  # fmt: skip
COMPACTION = record(type=one("compaction"), id=STRING, encrypted_content=STRING)
ITEM = either(MESSAGE, CALL, REASONING)
TOOL = record(
    type=one("function"), name=STRING, description=maybe(STRING), strict=maybe(BOOLEAN),
    parameters=maybe({"type": "object"}),
)  # fmt: skip
FUNCTION_CHOICE = record({"name": STRING}, type=one("function"))
MODE = one("none", "auto", "required")
ALLOWED = record(type=one("allowed_tools"), tools=listed(FUNCTION_CHOICE), mode=MODE)
JSON_FORMAT = record(
    type=one("json_schema"), name=STRING, description=maybe(STRING), schema={}, strict=BOOLEAN
)
FORMAT = either(record(type=one("text", "json_object")), JSON_FORMAT)
USAGE = record(
    input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER,
    input_tokens_details=record(cached_tokens=INTEGER),
    output_tokens_details=record(reasoning_tokens=INTEGER),
)  # fmt: skip
RESPONSE = record(
    id=STRING, object=one("response"), created_at=INTEGER, completed_at=maybe(INTEGER),
    status=STRING, incomplete_details=maybe(record(reason=STRING)), model=STRING,
    previous_response_id=maybe(STRING), instructions=maybe(STRING), output=listed(ITEM),
    error=maybe(record(code=STRING, message=STRING)), tools=listed(TOOL),
    tool_choice=either(FUNCTION_CHOICE, MODE, ALLOWED), truncation=one("auto", "disabled"),
    parallel_tool_calls=BOOLEAN, text=record(format=FORMAT), top_p=NUMBER, presence_penalty=NUMBER,
    frequency_penalty=NUMBER, top_logprobs=INTEGER, temperature=NUMBER,
    reasoning=maybe(record(effort=maybe(STRING), summary=maybe(STRING))), usage=maybe(USAGE),
    max_output_tokens=maybe(INTEGER), max_tool_calls=maybe(INTEGER), store=BOOLEAN,
    background=BOOLEAN, service_tier=STRING, metadata={}, safety_identifier=maybe(STRING),
    prompt_cache_key=maybe(STRING),
)  # fmt: skip


COMPACTED = record(
    id=STRING, object=one("response.compaction"), created_at=INTEGER, usage=USAGE,
    output=listed(either(MESSAGE, COMPACTION)),
)  # fmt: skip


def _events() -> dict[str, Schema]:
    """Schemas of events, by their type."""
    ends = ("created", "queued", "in_progress", "completed", "failed", "incomplete")
    found = {name: {"response": RESPONSE} for name in ends}
    item: dict[str, Schema] = {"output_index": INTEGER, "item": ITEM}
    at: dict[str, Schema] = {"item_id": STRING, "output_index": INTEGER}
    part: dict[str, Schema] = {**at, "content_index": INTEGER}
    found |= {f"output_item.{end}": item for end in ("added", "done")}
    found |= {f"content_part.{end}": {**part, "part": PART} for end in ("added", "done")}
    found["output_text.delta"] = {**part, "delta": STRING}
    found["output_text.done"] = {**part, "text": STRING}
    found["reasoning_text.delta"] = {**part, "delta": STRING}
    found["reasoning_text.done"] = {**part, "text": STRING}
    found["function_call_arguments.delta"] = {**at, "delta": STRING}
    found["function_call_arguments.done"] = {**at, "arguments": STRING}
    return {
        f"response.{name}": record(type=STRING, sequence_number=INTEGER, **fields)
        for name, fields in found.items()
    }


EVENTS = _events()
WEATHER: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Get the current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "City and state"}},
            "required": ["location"],
        },
    }
]
ASKED_WEATHER = "What's the weather like in San Francisco?"
WEATHER_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}'
    "\n</tool_call>"
)


def said(role: str, content: str, **more: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "basic-response": (
        {"input": [said("user", "Say hello in exactly 3 words.")]}, "Hello to you!"
    ),
    "assistant-phase": (
        {
            "input": [
                said("assistant", "I answer with the saved number.", phase="commentary"),
                said("assistant", "The number is four.", phase="final_answer"),
                said("user", "Repeat only the number."),
            ]
        },
        "Four.",
    ),
    "system-prompt": (
        {"input": [said("system", "You are a pirate."), said("user", "Say hello.")]}, "Ahoy!"
    ),
    "multi-turn": (
        {
            "input": [
                said("user", "My name is Alice."),
                said("assistant", "Hello Alice! Nice to meet you."),
                said("user", "What is my name?"),
            ]
        },
        "Alice.",
    ),
    "tool-calling": ({"input": [said("user", ASKED_WEATHER)], "tools": WEATHER}, WEATHER_CALL),
}  # fmt: skip
"""Cases of the suite, each with its request and the answer that the model is told to give."""


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    return hermes_front(tmp_path_factory.mktemp("open"))


def check(schema: Schema, value: object) -> None:
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


def streamed(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each checked; [DONE] is the last that it says."""
    with http.stream("POST", ROUTE, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        text = reply.read().decode()
    *blocks, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    events: list[dict[str, Any]] = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        check(EVENTS[event["type"]], event)
        events.append(event)
    return events


@pytest.mark.parametrize("case", CASES)
def test_answers(http: httpx.Client, script: Script, case: str) -> None:
    given, text = CASES[case]
    reply = http.post(ROUTE, json={"model": MODEL, "seed": script.tell(text + END), **given})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    check(RESPONSE, found)
    assert found["status"] == "completed" and found["output"]
    kinds = [item["type"] for item in found["output"]]
    assert kinds == ["function_call" if case == "tool-calling" else "message"]


@pytest.mark.parametrize("case", ["streaming-response", "tool-calling-streaming"])
def test_streams(http: httpx.Client, script: Script, case: str) -> None:
    given, text = CASES["tool-calling" if case == "tool-calling-streaming" else "basic-response"]
    events = streamed(http, {"model": MODEL, "seed": script.tell(text + END), **given})
    last = events[-1]
    assert last["type"] == "response.completed" and last["response"]["status"] == "completed"
    kinds = [event["type"].removeprefix("response.") for event in events]
    if case == "streaming-response":
        assert "output_text.delta" in kinds
        return
    ends = [e["item"]["type"] for e in events if e["type"].startswith("response.output_item.")]
    assert ends == ["function_call", "function_call"]
    assert {"function_call_arguments.delta", "function_call_arguments.done"} <= set(kinds)
    assert json.loads(last["response"]["output"][0]["arguments"]) == {
        "location": "San Francisco, CA"
    }


def test_thinking_in_a_stream(http: httpx.Client, script: Script) -> None:
    """Events of reasoning have the form of the specification too."""
    text = "<think>\nThey greet me.\n</think>\n\nHello." + END
    events = streamed(http, {"model": MODEL, "seed": script.tell(text), "input": "Hi"})
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize(
    "given",
    [
        {"tools": WEATHER, "tool_choice": {"type": "function", "name": "get_weather"}},
        {"tools": WEATHER, "tool_choice": {"type": "allowed_tools", "tools": [
            {"type": "function", "name": "get_weather"}]}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
        {"text": {"format": None}, "prompt_cache_key": "k", "safety_identifier": "s"},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5, "reasoning": {"effort": "none"}},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {"max_output_tokens": 1, "metadata": {"a": "b"}, "store": False},
    ],
    ids=lambda given: ",".join(given),
)  # fmt: skip
def test_settings_are_given_back(http: httpx.Client, given: dict[str, Any]) -> None:
    """Whatever a request sets, the response has it in the form of the specification."""
    asked = {"model": MODEL, "input": "hi", "max_output_tokens": 40, **given}
    reply = http.post(ROUTE, json=asked)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    check(RESPONSE, found)
    for name in ("prompt_cache_key", "safety_identifier", "presence_penalty", "frequency_penalty"):
        assert found[name] == given.get(name, 0 if name.endswith("penalty") else None)


def test_a_conversation_is_compacted(
    http: httpx.Client, script: Script, server: RunningServer
) -> None:
    """The case "compact-response". What the model wrote comes back as its answer."""
    given = [
        said("system", "Be brief."),
        said("user", "We agreed to launch on Tuesday and notify support first."),
        said("assistant", "Understood."),
    ]
    asked = {"model": MODEL, "prompt_cache_key": "openresponses-compact-test", "input": given}
    summary = "Launch on Tuesday, support first."
    reply = http.post(f"{ROUTE}/compact", json={**asked, "seed": script.tell(summary + END)})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    check(COMPACTED, found)
    assert [item["type"] for item in found["output"]] == ["message", "compaction"]
    assert found["output"][0]["content"][0]["text"] == "Be brief."
    assert found["usage"]["output_tokens"] == len(script.ids(summary + END))
    later = {"model": MODEL, "input": [*found["output"], said("user", "When?")]}
    assert http.post(ROUTE, json={**later, "max_output_tokens": 1}).status_code == 200
    shown = last_prompt(server)
    assert "Be brief." in shown and summary in shown and "When?" in shown
    assert "We agreed" not in shown
    foreign = {"type": "compaction", "encrypted_content": "gAAAAA=="}
    other = {"model": MODEL, "input": [foreign, said("user", "When?")], "max_output_tokens": 1}
    assert http.post(ROUTE, json=other).status_code == 200


def test_instructions_of_earlier_responses_outlive_a_summary(
    http: httpx.Client, script: Script
) -> None:
    given = [said("developer", "Answer in verse."), said("user", "Hi.")]
    first = http.post(ROUTE, json={"model": MODEL, "input": given, "max_output_tokens": 4}).json()
    asked = {"model": MODEL, "previous_response_id": first["id"], "input": [said("user", "More.")]}
    found = http.post(f"{ROUTE}/compact", json={**asked, "seed": script.tell("It was." + END)})
    assert found.status_code == 200, found.text
    assert found.json()["output"][0]["content"][0]["text"] == "Answer in verse."


def test_a_summary_that_is_none_is_refused(http: httpx.Client, script: Script) -> None:
    """A client would throw its conversation away for it. A session would take it for a turn."""
    asked = {"model": MODEL, "input": [said("user", "Hi.")]}
    empty = {**asked, "seed": script.tell(END)}
    for body, word in ((empty, "did not fit"), ({**asked, "session_id": "s"}, "session_id")):
        reply = http.post(f"{ROUTE}/compact", json=body)
        assert reply.status_code == 400 and word in reply.json()["error"]["message"]


def test_compacting_wants_a_model(http: httpx.Client) -> None:
    """The case "compact-missing-model"."""
    reply = http.post(f"{ROUTE}/compact", json={"input": [said("user", "Compact this.")]})
    assert reply.status_code == 400 and "model" in reply.json()["error"]["message"]


def test_an_image_is_refused_by_a_text_model(http: httpx.Client) -> None:
    """The case "image-input" wants a model that sees."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    given = [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, image]}]
    reply = http.post(ROUTE, json={"model": MODEL, "input": given})
    assert reply.status_code == 400 and "text only" in reply.json()["error"]["message"]


# --- over a WebSocket ---------------------------------------------------------------------------


def complete(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of one turn, of which every event is checked."""
    for event in events:
        check(EVENTS[event["type"]], event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert response["status"] == "completed" and response["output"]
    return response


def code_of(events: list[dict[str, Any]]) -> str:
    (error,) = events
    assert error["type"] == "error" and error["status"] == 400
    return error["error"]["code"]


def test_responses_follow_each_other_on_a_socket(server: RunningServer, script: Script) -> None:
    """The cases "websocket-response" and "websocket-sequential-responses"."""
    with SocketClient(server.port) as client:
        for text in ("First.", "Second."):
            seed = script.tell(text + END)
            events = client.turn(model=MODEL, store=False, input=f"Say {text}", seed=seed)
            found = complete(events)
            assert found["output"][0]["content"][0]["text"] == text and not found["store"]
            assert "response.output_text.delta" in [event["type"] for event in events]


def test_what_is_not_stored_goes_on_on_its_socket(server: RunningServer, script: Script) -> None:
    """The cases "websocket-continuation" and "websocket-reconnect-store-false-recovery"."""
    asked: dict[str, Any] = {"model": MODEL, "store": False}
    with SocketClient(server.port) as client:
        first = complete(
            client.turn(**asked, input="Remember: cobalt.", seed=script.tell("OK." + END))
        )
        previous = first["id"]
        for text in ("Cobalt.", "I said it."):
            seed = script.tell(text + END)
            given = {**asked, "previous_response_id": previous, "input": "Which word?"}
            found = complete(client.turn(**given, seed=seed))
            assert found["previous_response_id"] == previous
            previous = found["id"]
        shown = last_prompt(server)
        assert shown.count("Which word?") == 2 and "cobalt" in shown and "Cobalt." in shown
        reference = {"type": "item_reference", "id": found["output"][0]["id"]}
        items = [said("user", "Cobalt?"), reference, said("user", "Why?")]
        previous = complete(client.turn(**asked, input=items, seed=script.tell("So." + END)))["id"]
        assert "I said it." in last_prompt(server)
    with SocketClient(server.port) as client:
        again = {**asked, "previous_response_id": previous, "input": "Go on."}
        assert code_of(client.turn(**again)) == "previous_response_not_found"
        seed = script.tell("Recovered." + END)
        complete(client.turn(**asked, input=[said("user", "Start anew.")], seed=seed))


def test_stored_responses_go_on_anywhere(
    http: httpx.Client, server: RunningServer, script: Script
) -> None:
    """A conversation goes from a socket to HTTP and back."""
    with SocketClient(server.port) as client:
        first = complete(client.turn(model=MODEL, input="Hi.", seed=script.tell("Hello." + END)))
        given = {"model": MODEL, "input": "More.", "previous_response_id": first["id"]}
        second = http.post(ROUTE, json={**given, "seed": script.tell("Yes." + END)}).json()
        given["previous_response_id"] = second["id"]
        complete(client.turn(**given, store=False, seed=script.tell("Enough." + END)))
    assert "Hello." in last_prompt(server) and "Yes." in last_prompt(server)


def test_a_socket_knows_no_other_response(server: RunningServer) -> None:
    """The case "websocket-previous-response-not-found"."""
    with SocketClient(server.port) as client:
        given = {"model": MODEL, "store": False, "input": "Hi."}
        events = client.turn(**given, previous_response_id="resp_openresponses_missing")
        assert code_of(events) == "previous_response_not_found"


def test_a_failed_turn_ends_its_conversation(server: RunningServer, script: Script) -> None:
    """The case "websocket-failed-continuation-evicts-cache"."""
    asked: dict[str, Any] = {"model": MODEL, "store": False}
    with SocketClient(server.port) as client:
        first = complete(
            client.turn(**asked, input="Remember: ember.", seed=script.tell("OK." + END))
        )
        asked["previous_response_id"] = first["id"]
        output = {"type": "function_call_output", "call_id": "call_missing", "output": "none"}
        (failed,) = client.turn(**asked, input=[output])
        assert failed["type"] == "error" and "call_missing" in failed["error"]["message"]
        assert code_of(client.turn(**asked, input="Go on.")) == "previous_response_not_found"


def test_a_summary_begins_a_conversation_on_a_socket(
    http: httpx.Client, server: RunningServer, script: Script
) -> None:
    """The case "websocket-compact-new-chain"."""
    given = [said("user", "The word is slate."), said("assistant", "OK.")]
    asked = {"model": MODEL, "input": given, "seed": script.tell("The word is slate." + END)}
    output = http.post(f"{ROUTE}/compact", json=asked).json()["output"]
    with SocketClient(server.port) as client:
        asked = {"input": [*output, said("user", "Go on.")], "tools": []}
        seed = script.tell("Compacted." + END)
        complete(client.turn(model=MODEL, store=False, **asked, seed=seed))
