"""Requests that cannot be served: each gets a 4xx that names what is wrong, and costs nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from quire.bundled import bundled_model_path
from quire.config.families.reader import read_model_spec
from quire.config.settings import EngineSettings
from quire.engine.model_front import load_model_front
from quire.protocol.sampling_params import SAMPLING_PARAMETERS
from quire.server.http.body_shape import WINDOW_BYTES, _Scan, check_shape, check_shape_by_turns
from quire.server.requests.errors import ErrorReply, RefusedError
from quire.server.requests.limits import Limits
from tests import waiting
from tests.profiles import examples
from tests.server.running import RunningServer, running_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    return http.post(path, json={**base, "max_tokens": 2, **body})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temperatur": 1}, "temperature"),
    (CHAT, {"no_such_field_at_all": 1}, "no_such_field_at_all"),
    (CHAT, {"guided_json": {"not": {}}}, "the JSON Schema has $.not"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "json_schema has no schema"),
    (CHAT, {"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn is no field"),
    (CHAT, {"structured_outputs": {"json": {}, "regex": "a"}}, "json and regex"),
    (CHAT, {"structured_outputs": {"regex": 1}}, "structured_outputs.regex is '1'"),
    (CHAT, {"structured_outputs": {"regex": "("}}, "no regular expression: unclosed group"),
    (
        CHAT,
        {"structured_outputs": {"regex": "("}, "stream": True},
        "which is no regular expression",
    ),
    (CHAT, {"guided_regex": "a", "guided_json": {}}, "json and regex"),
    (CHAT, {"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "Send one of them"),
    (TEXT, {"tools": [{"type": "function"}]}, "completions have no tools"),
    (TEXT, {"parallel_tool_calls": 1}, "parallel_tool_calls is 1"),
    (CHAT, {"stream_interval": True}, "stream_interval is True"),
    (CHAT, {"echo": 0}, "echo is 0"),
    (CHAT, {"temperature": "hot"}, "temperature: expected float or null, got str"),
    (CHAT, {"temperature": -0.1}, "temperature is -0.1"),
    (CHAT, {"top_p": 1.5}, "top_p is 1.5"),
    (CHAT, {"n": 0}, "n is 0, but this server gives 1 to 16 (max_n)"),
    (CHAT, {"n": 17}, "max_n"),
    (CHAT, {"n": 10**9}, "gives 1 to 16 (max_n)"),
    (CHAT, {"max_tokens": 0}, "max_tokens is 0"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens is 0"),
    (CHAT, {"max_tokens": 100_000}, "maximum context length is 512 tokens"),
    (CHAT, {"min_tokens": 9}, "min_tokens is 9"),
    (CHAT, {"top_logprobs": 2}, "logprobs is not true"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "max_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs is -1"),
    (CHAT, {"stop": ["x"] * 17}, "max_stop"),
    (CHAT, {"stop": "x" * 300}, "max_stop_chars"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream is not true"),
    (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT, {"logit_bias": {"not a token": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"99999": 1}}, "99999"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(1025)}}, "max_logit_bias"),
    (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids"),
    (CHAT, {"cache_salt": "x" * 129}, "max_label_chars"),
    (CHAT, {"cache_salt": "a\nb"}, "printable"),
    (CHAT, {"seed": 2**64}, "seed"),
    (CHAT, {"chat_template": "{{ messages }}"}, "--trust-request-chat-template"),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "both true"),
    (CHAT, {"messages": []}, "messages is empty"),
    (CHAT, {"messages": [{"content": "x"}]}, "role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
    (CHAT, {"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0] is 7"),
    (CHAT, {"messages": MESSAGES * 2049}, "max_messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 80_000}]}, "max_prompt_chars"),
    (TEXT, {"prompt": "", "add_special_tokens": False}, "at least one character"),
    (TEXT, {"prompt": []}, "empty list"),
    (TEXT, {"prompt": [1, "a"]}, "mixes"),
    (TEXT, {"prompt": [[]]}, "no tokens"),
    (TEXT, {"prompt": [-1]}, "-1"),
    (TEXT, {"prompt": [10**12]}, "outside the vocabulary"),
    (TEXT, {"prompt": ["a"] * 300}, "max_sequences"),
    (TEXT, {"prompt": ["a"] * 20, "n": 16}, "max_sequences"),
    (TEXT, {"suffix": "end"}, "suffix"),
    (TEXT, {"best_of": 4}, "use_beam_search"),
    (TEXT, {"length_penalty": 2}, "use_beam_search"),
    (CHAT, {"early_stopping": True}, "use_beam_search"),
    (TEXT, {"use_beam_search": True, "best_of": 9}, "max_beam_width"),
    (TEXT, {"use_beam_search": True, "best_of": 0}, "1 to 8 (max_beam_width)"),
    (TEXT, {"use_beam_search": True, "best_of": 2, "n": 3}, "finds 2 sequences"),
    (TEXT, {"use_beam_search": True, "stop": "."}, "stop_token_ids"),
    (CHAT, {"use_beam_search": True, "n": 2, "top_k": 5}, "top_k is 5"),
    (TEXT, {"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    (TEXT, {"prompt": ["a"] * 40, "use_beam_search": True, "best_of": 8}, "max_sequences"),
    (TEXT, {"logprobs": 21}, "max_logprobs"),
    (TEXT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (TEXT, {"priority": 101}, "max_priority"),
    (TEXT, {"priority": 1}, "scheduling_policy does not look at priorities"),
    (TEXT, {"deadline_s": 0}, "deadline_s"),
    (TEXT, {"deadline_s": -1.5}, "deadline_s"),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_names_what_is_wrong(
    http: httpx.Client, path: str, body: dict[str, Any], words: str
) -> None:
    reply = post(http, path, body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert words in error["message"], error
    assert error["code"] == 400 and error["type"] == "BadRequestError"
    assert len(reply.content) <= 2048


RESPONSES, TOKENS = "/v1/responses", "/inference/v1/generate"
ANTHROPIC = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "hi"},
    ANTHROPIC: {"model": "bundled", "messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "bundled", "messages": MESSAGES},
    TOKENS: {"token_ids": [5, 6]},
    "/v1/embeddings": {"input": "hi"},
}
NOT_HELD = {"type": "object", "properties": {"a": {"not": {}}}}
LONG = "x " * 900


def asked_format(**form: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", **form}}}


def schema_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", **fields}]}


def messages_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", **fields}]}


OWN_NAMES: list[tuple[str, dict[str, Any], str, str | None]] = [
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens is 0", "max_output_tokens"),
    (RESPONSES, {"max_output_tokens": 999}, "(max_output_tokens)", "max_output_tokens"),
    (RESPONSES, {"input": []}, "input is empty", "input"),
    (RESPONSES, {"input": [{"role": "user", "content": []}]}, "input[0].content is []", "input"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 300}]},
        "a message of input: content has 300 parts",
        "input",
    ),
    (
        RESPONSES,
        {"tool_choice": "any"},
        'tool_choice is \'any\'. Use "none", "auto"',
        "tool_choice",
    ),
    (RESPONSES, asked_format(), "text.format has no schema", "text"),
    (RESPONSES, asked_format(schema={}, strict=5), "text.format.strict is a switch", "text"),
    (RESPONSES, asked_format(schema=NOT_HELD, strict=True), "$.properties.a.not", "text"),
    (RESPONSES, schema_tool(strict=5), "tools[0].strict is '5'", "tools"),
    (RESPONSES, schema_tool(description=5), "tools[0].description is '5'", "tools"),
    (RESPONSES, schema_tool(parameters=[]), "tools[0].parameters is '[]'", "tools"),
    (RESPONSES, schema_tool(parameters=NOT_HELD, strict=True), "tools[0].parameters: ", "tools"),
    (
        RESPONSES,
        {
            "reasoning": {"effort": "low"},
            "chat_template_kwargs": {"reasoning_effort": "max_tokens"},
        },
        "reasoning.effort is 'low', but chat_template_kwargs.reasoning_effort is 'max_tokens'",
        "reasoning",
    ),
    (
        RESPONSES,
        {"truncation": "set max_tokens to 5"},
        "'set max_tokens to 5'",  # what the client wrote stays
        "truncation",
    ),
    (RESPONSES, {"input": LONG}, "of the completion (max_output_tokens)", None),
    ("/v1/responses/input_tokens", {"input": []}, "input is empty", "input"),
    (ANTHROPIC, {"stop_sequences": [""]}, "stop_sequences has ''", None),
    (ANTHROPIC, {"stop_sequences": ["x" * 999]}, "a string of stop_sequences has", None),
    (ANTHROPIC, messages_tool(input_schema=[]), "tools[0].input_schema is '[]'", None),
    (ANTHROPIC, messages_tool(description=5), "tools[0].description is '5'", None),
    (
        ANTHROPIC,
        messages_tool(input_schema=NOT_HELD, strict=True),
        "tools[0].input_schema: ",
        None,
    ),
    (TOKENS, {"token_ids": []}, "The prompt has no tokens", "token_ids"),
    (
        TOKENS,
        {"sampling_params": {"temperature": -1}},
        "sampling_params.temperature is -1",
        "sampling_params",
    ),
    (
        TOKENS,
        {"sampling_params": {"max_tokens": 999}},
        "(sampling_params.max_tokens)",
        "sampling_params",
    ),
    ("/v1/embeddings", {"input": LONG * 200}, "max_prompt_chars", "input"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "words", "param"),
    OWN_NAMES,
    ids=lambda value: str(value)[:50],
)
def test_names_the_fields_of_the_route(
    http: httpx.Client, path: str, body: dict[str, Any], words: str, param: str | None, stream: bool
) -> None:
    """Fault: an error names a field of the chat that the request became."""
    asked = {**BODIES[path], **body}
    if stream and path in (RESPONSES, ANTHROPIC, TOKENS):
        asked["stream"] = True
    reply = http.post(path, json=asked)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert words in error["message"], error["message"]
    assert error.get("param") == param


PARAMS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temperature": -0.1}, "temperature"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"seed": 2**64}, "seed"),
    (CHAT, {"stop": [""]}, "stop"),
    (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (CHAT, {"max_tokens": 100_000}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 100_000}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 10**20}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 80_000}]}, "messages"),
    (TEXT, {"prompt": "x" * 80_000}, "prompt"),
    (TEXT, {"prompt": "", "add_special_tokens": False}, "prompt"),
    (TEXT, {"prompt": [10**12]}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"priority": 1}, "priority"),
    (TEXT, {"use_beam_search": True, "best_of": 2, "n": 3}, "n"),
    (TEXT, {"use_beam_search": True, "n": 9}, "n"),
    (TEXT, {"use_beam_search": True, "stop": "."}, "stop"),
]


@pytest.mark.parametrize(("path", "body", "param"), PARAMS, ids=lambda value: str(value)[:60])
def test_names_the_field_at_fault(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert post(http, path, body).json()["error"]["param"] == param


def test_names_the_field_that_is_missing(http: httpx.Client) -> None:
    for path, param in ((CHAT, "messages"), (TEXT, "prompt")):
        assert http.post(path, json={"max_tokens": 1}).json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [{"tools": None}, {"response_format": {"type": "text"}}, {"priority": 0}, {"user": "me"}],
    ids=str,
)
def test_fields_that_ask_for_nothing_are_taken(http: httpx.Client, body: dict[str, Any]) -> None:
    assert post(http, CHAT, body).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", {}, 400),
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b"null", {}, 400),
        (b'{"prompt": "\xff"}', {}, 400),
        (b'{"prompt": "\\ud800"}', {}, 400),
        (b'{"prompt": "a", "temperature": NaN}', {}, 400),
        (b'{"prompt": "a", "temperature": 1e999}', {}, 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", {}, 400),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400),
        (b'{"prompt": [' + b"1," * 300_000 + b"1]}", {}, 400),
        (b'{"prompt": "a", "' + b"k" * 1000 + b'": 1}', {}, 400),
        (b'{"prompt": "' + b"a" * (9 * 2**20) + b'"}', {}, 413),
        (b"prompt=a", {"content-type": "application/x-www-form-urlencoded"}, 415),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-encoding": "gzip"}, 415),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bodies(http: httpx.Client, content: bytes, headers: dict[str, str], status: int) -> None:
    headers = {"content-type": "application/json", **headers}
    reply = http.post(TEXT, content=content, headers=headers)
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]
    assert len(reply.content) <= 2048


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": [{"text": "a" * 200_000}]},
        {"chat_template_kwargs": {"context": "a" * 200_000}},
        {"messages": [{**MESSAGES[0], "name": "a" * 200_000}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_all_that_a_template_writes_counts(http: httpx.Client, fields: dict[str, Any]) -> None:
    reply = post(http, CHAT, {"messages": MESSAGES, "max_tokens": 1, **fields})
    assert reply.status_code == 400 and "max_prompt_chars" in reply.json()["error"]["message"]


def test_retry_after_is_spread() -> None:
    """Clients that were refused together do not come back together, nor much later than told."""
    found = {
        int(ErrorReply(503, "full", retry_after_s=10.0).headers["retry-after"]) for _ in range(200)
    }
    assert len(found) > 2 and found <= set(range(8, 13))
    assert int(ErrorReply(503, "full", retry_after_s=0.01).headers["retry-after"]) == 1


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    missing = http.get("/v1/no-such-route")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "NotFoundError"
    wrong = http.get(TEXT)
    assert wrong.status_code == 405 and "GET" in wrong.json()["error"]["message"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
FIELDS = (
    *SAMPLING_PARAMETERS, "model", "prompt", "messages", "top_logprobs",
    "echo", "stream", "stream_options", "cache_salt", "request_id",
    "chat_template_kwargs", "documents", "reasoning_effort", "verbosity", "tools",
    "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 2**31, 2**53, 2**63, -(2**63), 1e308, -0.0, 0.5, True, "1", None, "\x00", ""]
)


@examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(
        [CHAT, TEXT, f"{TEXT}/render", "/tokenize", "/detokenize", "/generate", "/chat"]
    ),
    fields=st.dictionaries(st.sampled_from(FIELDS), NUMBERS | ANYTHING, max_size=4),
)
def test_no_body_makes_the_server_fail(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    base: dict[str, Any] = {"max_tokens": 2}
    if path == CHAT:
        base["messages"] = MESSAGES
    elif path.startswith(TEXT):
        base["prompt"] = "hi"
    elif path == "/generate":
        base["prompts"] = ["hi"]
    elif path == "/chat":
        base["messages"] = [MESSAGES]
    content = json.dumps({**base, **fields}).encode("utf-8", "surrogatepass")
    with waiting.PatientClient(base_url=server.url) as http:
        reply = http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code < 500, (fields, reply.text)
    server.wait_until_idle()


@pytest.mark.parametrize("piece", [b"[]", b"[],", b'"",', b'""', b"{}"])
def test_shape_check_gives_up_early(piece: bytes) -> None:
    """A body that cannot be within bounds is not read to its end, which would block the event
    loop."""
    counted = 0

    class Counting(bytes):
        def __getitem__(self, index: Any) -> Any:
            nonlocal counted
            counted += 1
            return super().__getitem__(index)

    with pytest.raises(RefusedError, match="max_json_nodes"):
        check_shape(Counting(b"[" + piece * 100_000), Limits(max_json_nodes=1000))
    assert counted <= 3000 + 10  # the brackets, and a few windows


@examples(60)
@given(value=ANYTHING)
def test_shape_check_agrees_with_a_plain_count(value: Any) -> None:
    def depth(item: Any) -> int:
        inner = list(item.values()) if isinstance(item, dict) else item
        if not isinstance(inner, list):
            return 0
        return 1 + max(map(depth, inner), default=0)

    body = json.dumps(value).encode()
    for highest in (1, 2, 3):
        limits = Limits(max_json_depth=highest, max_json_key_bytes=10**6)
        if depth(value) > highest:
            with pytest.raises(RefusedError, match="max_json_depth"):
                check_shape(body, limits)
        else:
            check_shape(body, limits)


AROUND_A_WINDOW = range(WINDOW_BYTES - 12, WINDOW_BYTES + 3)


@pytest.mark.parametrize(
    ("cut", "limit"),
    [
        (b'"%s\\\\","b":[[[', "max_json_depth"),
        (b'"%s\\\\\\"[[[[[","b":[[[', "max_json_depth"),
        (b'"%s" \n :[1', "max_json_key_bytes"),
        (b'"%s",1,"' + b"k" * 300 + b'" : [1', "max_json_key_bytes"),
        (b'"%s",' + b"1," * 50, "max_json_nodes"),
    ],
)
def test_shape_check_sees_across_windows(cut: bytes, limit: str) -> None:
    """Whatever stands where one window ends and the next begins."""
    limits = Limits(max_json_depth=3, max_json_nodes=40)
    for size in AROUND_A_WINDOW:
        with pytest.raises(RefusedError, match=limit):
            check_shape(b"[" + cut % (b"a" * (size - 2)), limits)


def test_no_window_takes_in_the_space_of_the_next_ones() -> None:
    """Fault: a long string is followed by space up to the end of the body, seen at one go."""
    long = b'{"' + b"k" * 300 + b'"' + b" " * (3 * WINDOW_BYTES)
    for rest, is_key in ((b":1}", True), (b",1}", False)):
        windows = _Scan(long + rest, Limits(max_json_key_bytes=200)).windows()
        for _ in range(3):
            next(windows)
        with pytest.raises(RefusedError, match="key_bytes") if is_key else nullcontext():
            list(windows)


@pytest.mark.parametrize(
    "fits", [b'"%s\\\\[[[[","b":[[', b'"%s\\"[[[[",[[', b'"%s[[[[,,,,,,,,,",[[', b'"%s",{"b":[']
)
def test_shape_check_takes_what_fits_across_windows(fits: bytes) -> None:
    limits = Limits(max_json_depth=3, max_json_nodes=5)
    for size in AROUND_A_WINDOW:
        check_shape(b"[" + fits % (b"a" * (size - 2)), limits)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"' + b"a" * (8 * 2**20),
        b'{"prompt":"' + b"\\" * (8 * 2**20),
        b'{"prompt":"' + b"," * (8 * 2**20),
        b'{"prompt":' + b" " * (8 * 2**20),
        b'{"prompt":[' + b"[]," * 190_000,
        b'{"prompt":[' + b'"",' * 190_000,
    ],
    ids=["string", "escapes", "commas", "spaces", "lists", "strings"],
)
def test_the_check_of_a_large_body_gives_way(body: bytes) -> None:
    """Other requests get their turn again and again while it goes on."""
    num_turns = 0

    async def work() -> None:
        nonlocal num_turns
        checking = asyncio.create_task(check_shape_by_turns(body, Limits()))
        while not checking.done():
            num_turns += 1
            await asyncio.sleep(0)
        checking.result()

    asyncio.run(work())
    assert num_turns >= len(body) // (WINDOW_BYTES + 1)


def test_a_deadline_that_cannot_be_met_is_503(http: httpx.Client) -> None:
    """Dropped before anything is computed."""
    body = {"prompt": "x", "max_tokens": 4, "deadline_s": 1e-9}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 503
    assert "deadline_s" in reply.json()["error"]["message"]
    assert float(reply.headers["retry-after"]) > 0
    body["deadline_s"] = 60
    assert http.post("/v1/completions", json=body).status_code == 200


def test_a_broken_chat_template_disables_chat_only(tmp_path: Path) -> None:
    """Fault: the server does not start, or does not say why it refuses chats."""
    folder = Path(shutil.copytree(bundled_model_path(), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages | nope }}")
    front = load_model_front(EngineSettings(model=str(folder)), folder, read_model_spec(folder))
    with (
        running_server(front) as server,
        waiting.PatientClient(base_url=server.url) as http,
    ):
        assert post(http, TEXT, {}).status_code == 200
        for path, body in ((CHAT, {}), ("/tokenize", {"messages": MESSAGES})):
            reply = post(http, CHAT, {}) if path == CHAT else http.post(path, json=body)
            assert reply.status_code == 400
            assert "Chat is disabled" in reply.text and "No filter named 'nope'" in reply.text
        info = http.get("/tokenizer_info").json()
        assert info["chat_template"] == "{{ messages | nope }}"
        server.wait_until_idle()
