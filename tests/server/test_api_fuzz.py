"""Bodies of the newer routes with any JSON in any place: answered, or refused with a status that
/openapi.json names, and never a fault of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.model_front import ModelFront
from tests import waiting
from tests.profiles import machine_settings
from tests.server.running import MODEL, RunningServer, running_server
from tests.server.scripted import hermes_front

WORDS = (
    "type", "text", "role", "content", "name", "id", "user", "assistant", "system", "function",
    "tool_use", "tool_result", "tool_use_id", "thinking", "signature", "input", "call_id",
    "function_call", "function_call_output", "custom", "custom_tool_call", "reasoning", "message",
    "arguments", "output", "json_schema", "schema", "format", "effort", "enabled", "budget_tokens",
    "auto", "any", "tool", "none", "grammar", "regex", "definition", "syntax", "namespace",
    "tools", "parameters", "input_schema", "object", "properties", "document", "source", "data",
    "input_text", "output_text", "allowed_tools", "mode", "strict", "encrypted_content", "summary",
)  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.sampled_from(WORDS)
    | st.text(max_size=5)
)  # fmt: skip
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)
TOOL = {"name": "f", "description": "F.", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BASES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": MODEL, "max_tokens": 2, "system": "s", "tools": [TOOL], "tool_choice": None,
        "thinking": None, "output_config": None, "stop_sequences": None, "stream": False,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [
                    {"type": "text", "text": "r"}]}]},
        ],
    },
    "/v1/messages/count_tokens": {
        "model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL],
    },
    "/v1/responses": {
        "model": MODEL, "max_output_tokens": 2, "instructions": "i", "tools": [FUNCTION],
        "tool_choice": "auto", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
        "include": [], "truncation": "auto", "store": True, "metadata": {}, "stream": False,
        "previous_response_id": None,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [
                {"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "r"},
        ],
    },
    "/v1/responses/input_tokens": {"input": "hi", "tools": [FUNCTION]},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/v1/embeddings": {"input": ["a"], "dimensions": 4, "encoding_format": "float"},
    "/rerank": {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    return hermes_front(tmp_path_factory.mktemp("fuzzed"))


@pytest.fixture(scope="module")
def server(front: ModelFront) -> Iterator[RunningServer]:
    with running_server(front) as found:
        yield found


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with waiting.PatientClient(base_url=server.url) as client:
        yield client
    server.wait_until_idle()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places of values within a body."""
    inner: list[tuple[Any, ...]] = []
    if isinstance(value, dict):
        inner = [place for key in value for place in places(value[key], (*path, key))]
    elif isinstance(value, list):
        inner = [place for i, each in enumerate(value) for place in places(each, (*path, i))]
    return [path, *inner] if path else inner


def with_value(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a body with another value at one place."""
    copy = json.loads(json.dumps(body))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


@pytest.mark.parametrize("route", BASES)
def test_any_value_in_any_place(http: httpx.Client, server: RunningServer, route: str) -> None:
    document = http.get("/openapi.json").json()
    statuses = set(document["paths"][route]["post"]["responses"])
    base = BASES[route]
    assert http.post(route, json=base).status_code == 200

    @machine_settings(150)
    @given(st.sampled_from(places(base)), JSON)
    def check(path: tuple[Any, ...], value: Any) -> None:
        body = with_value(base, path, value)
        reply = http.post(route, json=body)
        assert str(reply.status_code) in statuses, (body, reply.text)
        assert reply.status_code < 500, (body, reply.text)
        if reply.status_code != 200 and reply.headers["content-type"] == "application/json":
            assert reply.json()["error"]["message"]

    check()
