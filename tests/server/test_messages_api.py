"""The Messages API through its official client: answers, streams, tools, thinking, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import anthropic
import pytest
from pydantic import BaseModel

from quire.engine.model_front import ModelFront
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.running import MODEL, RunningServer, bundled_front, running_server
from tests.server.scripted import Script, hermes_front
from tests.waiting import WAIT_S

ASKED: Any = [{"role": "user", "content": "How warm is it in Rome?"}]
TOOLS: Any = [
    {
        "name": "weather",
        "description": "The weather of a place.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
THOUGHT = "<think>\nThey ask for the weather.\n</think>\n\n"
END = "<|end|>"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    return hermes_front(tmp_path_factory.mktemp("hermes"))


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with _client(server.url) as found:
        yield found
    server.wait_until_idle()


def _client(url: str, **given: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=url,
        max_retries=0,
        timeout=WAIT_S,
        _strict_response_validation=True,
        **({"api_key": "none"} | given),
    )


def both(
    client: anthropic.Anthropic, script: Script, text: str, **given: Any
) -> anthropic.types.Message:
    """The answer that the model is told to give, which a stream builds too."""
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": 200, **given}
    whole = client.messages.create(**asked, extra_body={"seed": script.tell(text)})
    check_complete(whole)
    with client.messages.create(
        **asked, stream=True, extra_body={"seed": script.tell(text)}
    ) as events:
        for event in events:
            check_complete(event)
    with client.messages.stream(**asked, extra_body={"seed": script.tell(text)}) as stream:
        check_order([event.type for event in stream])
        streamed = stream.get_final_message()
    assert without_ids(streamed) == without_ids(whole)
    return whole


OPTIONAL = {"toolset_name", "parsed_output"}
"""Fields that answers of the API may lack; all others of its types it always gives, or null."""


def check_complete(value: object, place: str = "") -> None:
    """Every field of the official types is in what was received."""
    if isinstance(value, list):
        for index, each in enumerate(cast("list[object]", value)):
            check_complete(each, f"{place}[{index}]")
    elif isinstance(value, BaseModel):
        names = type(value).model_fields.keys() - OPTIONAL
        assert names <= value.model_fields_set, (place, names - value.model_fields_set)
        for name in names:
            check_complete(getattr(value, name), f"{place}.{name}")


def check_order(kinds: list[str]) -> None:
    """One block at a time between the start and the end of the message."""
    raw = [kind for kind in kinds if kind.startswith(("message_", "content_block_"))]
    assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"]
    is_open = False
    for kind in raw[1:-2]:
        assert is_open is (kind != "content_block_start")
        is_open = kind != "content_block_stop"
    assert not is_open


def without_ids(message: anthropic.types.Message) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(message.to_json())
    for block in found["content"]:
        block.pop("id", None)
        for absent in ("parsed_output", "citations", "caller"):
            block.pop(absent, None)
    return {name: found[name] for name in ("content", "stop_reason", "stop_sequence", "model")}


def test_a_text(client: anthropic.Anthropic, script: Script) -> None:
    found = both(client, script, "It is warm." + END)
    assert [block.type for block in found.content] == ["text"]
    assert found.content[0].text == "It is warm."  # type: ignore[union-attr]
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    assert found.id.startswith("msg_")
    assert found.usage.output_tokens == len(script.ids("It is warm." + END))


def test_an_answer_that_is_cut(client: anthropic.Anthropic, script: Script) -> None:
    assert both(client, script, "It is warm." + END, max_tokens=2).stop_reason == "max_tokens"
    cut = client.messages.create(
        model=MODEL, messages=ASKED, tools=TOOLS, max_tokens=len(script.ids(CALL)) - 6,
        extra_body={"seed": script.tell(CALL + END)},
    )  # fmt: skip
    assert cut.stop_reason == "max_tokens"
    assert [block.type for block in cut.content] == ["tool_use"]


@pytest.mark.parametrize("max_tokens", [32_000, 2**40])
def test_more_tokens_than_the_context_has_are_cut_to_its_room(
    client: anthropic.Anthropic, script: Script, max_tokens: int
) -> None:
    """Fault: 400 for what Claude Code asks of every model."""
    assert both(client, script, "Warm." + END, max_tokens=max_tokens).stop_reason == "end_turn"
    given = {"seed": script.tell("x" * 2000)}
    found = client.messages.create(
        model=MODEL, messages=ASKED, max_tokens=max_tokens, extra_body=given
    )
    assert found.stop_reason == "max_tokens"
    assert found.usage.input_tokens + found.usage.output_tokens == 512


def test_a_stop_sequence(client: anthropic.Anthropic, script: Script) -> None:
    found = both(client, script, "One. Two. Three." + END, stop_sequences=["Two", "x"])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "Two")
    assert found.content[0].text == "One. "  # type: ignore[union-attr]


def test_a_call(client: anthropic.Anthropic, script: Script) -> None:
    found = both(client, script, "I look." + CALL + END, tools=TOOLS)
    text, call = found.content
    assert (text.type, call.type, found.stop_reason) == ("text", "tool_use", "tool_use")
    assert call.type == "tool_use" and call.input == {"city": "Rome", "days": 2}
    assert call.name == "weather" and call.id


def test_white_space_makes_no_block(client: anthropic.Anthropic, script: Script) -> None:
    found = both(client, script, THOUGHT + CALL + END, tools=TOOLS, thinking=enabled())
    assert [block.type for block in found.content] == ["thinking", "tool_use"]


def enabled(budget: int = 1024, **others: Any) -> Any:
    return {"type": "enabled", "budget_tokens": budget, **others}


@pytest.mark.parametrize(
    ("choice", "texts"),
    [
        ({"type": "any"}, (CALL,)),
        ({"type": "tool", "name": "weather"}, (CALL,)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (CALL, "Warm.")),
        ({"type": "none"}, ("Warm.",)),
    ],
)
def test_choices_of_tools(
    client: anthropic.Anthropic, script: Script, choice: Any, texts: tuple[str, ...]
) -> None:
    for text in texts:
        found = both(client, script, text + END, tools=TOOLS, tool_choice=choice)
        assert found.stop_reason == ("tool_use" if text == CALL else "end_turn")
    if "Warm." not in texts:
        with pytest.raises(anthropic.APIError):  # the script finds that it is forbidden
            both(client, script, "Warm." + END, tools=TOOLS, tool_choice=choice)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_format_beside_a_call_that_must_come(
    client: anthropic.Anthropic, script: Script, choice: Any
) -> None:
    """Fault: 400, though the format is about a text that does not come."""
    form: Any = {"type": "json_schema", "schema": {"type": "object"}}
    config: Any = {"format": form}
    found = both(client, script, CALL + END, tools=TOOLS, tool_choice=choice, output_config=config)
    assert [block.type for block in found.content] == ["tool_use"]


def test_several_calls_unless_they_are_forbidden(
    client: anthropic.Anthropic, script: Script
) -> None:
    text = CALL + "\n" + CALL + END
    found = both(client, script, text, tools=TOOLS)
    assert [block.type for block in found.content] == ["tool_use", "tool_use"]
    with pytest.raises(anthropic.APIError):
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        both(client, script, text, tools=TOOLS, tool_choice=choice)


def test_thinking_goes_back_and_forth(
    client: anthropic.Anthropic, script: Script, server: RunningServer
) -> None:
    found = both(client, script, THOUGHT + "Warm." + END, thinking=enabled())
    thinking, text = found.content
    assert thinking.type == "thinking" and "They ask" in thinking.thinking
    assert thinking.signature and text.type == "text"
    shown = prompt_of(server, client, [*ASKED, {"role": "assistant", "content": found.content}])
    assert "They ask for the weather." in shown


def test_thinking_that_is_not_shown_goes_back_and_forth(
    client: anthropic.Anthropic, script: Script, server: RunningServer
) -> None:
    found = both(client, script, THOUGHT + "Warm." + END, thinking=enabled(display="omitted"))
    assert found.content[0].type == "thinking" and found.content[0].thinking == ""
    shown = prompt_of(server, client, [*ASKED, {"role": "assistant", "content": found.content}])
    assert "They ask for the weather." in shown


@pytest.mark.parametrize(
    "signature", ["", "EqQBCkYIBxgCKkB", "quire1.!", "quire1._w==", "quire1.é"]
)
def test_signatures_of_others_are_no_fault(
    client: anthropic.Anthropic, server: RunningServer, signature: str
) -> None:
    blocks: Any = [
        {"type": "thinking", "thinking": "", "signature": signature},
        {"type": "redacted_thinking", "data": "abc"},
        {"type": "text", "text": "Warm."},
    ]
    shown = prompt_of(server, client, [*ASKED, {"role": "assistant", "content": blocks}])
    assert shown.count("<think>") == 1  # the closed one before the answer


def test_without_thinking_the_template_is_told(
    client: anthropic.Anthropic, server: RunningServer
) -> None:
    closed = "<think>\n\n</think>"
    assert prompt_of(server, client, ASKED).endswith("<|assistant|>" + closed + "\n\n")
    for thinking in (enabled(), {"type": "adaptive"}):
        shown = prompt_of(server, client, ASKED, thinking=thinking)
        assert shown.endswith("<|assistant|>")


def prompt_of(
    server: RunningServer, client: anthropic.Anthropic, messages: Any, **given: Any
) -> str:
    """The prompt that the engine got."""
    client.messages.create(
        model=MODEL, messages=[*messages, *([] if messages is ASKED else ASKED)],
        **{"max_tokens": 1, **given},
    )  # fmt: skip
    request = server.client.added[-1]
    tokenizer = server.backend.require().model.front.renderer.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(request.prompt_token_ids.tolist(), skip_special_tokens=False)


def test_a_loop_of_calls_and_results(
    client: anthropic.Anthropic, script: Script, server: RunningServer
) -> None:
    """Blocks go back as they came, and the prompt is what the chat route makes of it."""
    messages: list[Any] = list(ASKED)
    for text in (CALL, "18 degrees."):
        answer = client.messages.create(
            model=MODEL, messages=messages, tools=TOOLS, max_tokens=100,
            system=[{"type": "text", "text": "Be kind."}],
            extra_body={"seed": script.tell(text + END)},
        )  # fmt: skip
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "18", "is_error": False}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if results:
            note = {"type": "text", "text": "Go on."}
            messages.append({"role": "user", "content": [*results, note]})
    assert messages[-1]["content"][0].text == "18 degrees."
    prompt = server.client.added[-1].prompt_token_ids.tolist()
    call = {"name": "weather", "arguments": '{"city":"Rome","days":2}'}
    function = {name: TOOLS[0][name] for name in ("name", "description")}
    function["parameters"] = TOOLS[0]["input_schema"]
    chat = {
        "messages": [
            {"role": "system", "content": "Be kind."},
            *ASKED,
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": messages[1]["content"][0].id, "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": messages[1]["content"][0].id, "content": "18"},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 1,
    }  # fmt: skip
    assert waiting.post(f"{server.url}/v1/chat/completions", json=chat).status_code == 200
    assert server.client.added[-1].prompt_token_ids.tolist() == prompt


def test_errors_of_tools_and_what_only_others_read(
    client: anthropic.Anthropic, server: RunningServer
) -> None:
    image = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    result = {
        "type": "tool_result", "tool_use_id": "t1", "is_error": True,
        "content": [{"type": "text", "text": "no such place"}, {"type": "image", "source": image}],
    }  # fmt: skip
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    shown = prompt_of(
        server, client,
        [*ASKED, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
    )  # fmt: skip
    assert "Error: no such place\n[image left out" in shown
    with pytest.raises(anthropic.BadRequestError, match="takes text only"):
        prompt_of(
            server, client,
            [{"role": "user", "content": [{"type": "image", "source": image}]}],
        )  # fmt: skip


def test_a_begun_answer_is_continued(client: anthropic.Anthropic, server: RunningServer) -> None:
    begun: Any = [*ASKED, {"role": "assistant", "content": "It is"}]
    client.messages.create(model=MODEL, messages=begun, max_tokens=1)
    tokenizer = server.backend.require().model.front.renderer.tokenizer
    assert tokenizer is not None
    tokens = server.client.added[-1].prompt_token_ids.tolist()
    assert tokenizer.decode(tokens, skip_special_tokens=False).endswith("<|assistant|>It is")


def test_a_format(client: anthropic.Anthropic) -> None:
    class Answer(BaseModel):
        warm: bool

    schema = {**Answer.model_json_schema(), "additionalProperties": False}
    config: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    for seed in range(3):
        found = client.messages.create(
            model=MODEL, messages=ASKED, max_tokens=60, output_config=config,
            extra_body={"seed": seed},
        )  # fmt: skip
        assert found.content[0].type == "text"
        Answer.model_validate_json(found.content[0].text)


def test_the_helper_parses_a_format(client: anthropic.Anthropic, script: Script) -> None:
    class Answer(BaseModel):
        warm: bool

    found = client.messages.parse(
        model=MODEL, messages=ASKED, max_tokens=60, output_format=Answer,
        extra_body={"seed": script.tell('{"warm": true}' + END)},
    )  # fmt: skip
    assert found.parsed_output == Answer(warm=True)


def test_counts_are_those_of_the_prompt(client: anthropic.Anthropic, server: RunningServer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "system": "Hi.", "tools": TOOLS}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted == len(server.client.added[-1].prompt_token_ids)
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_cached_tokens_are_real_hits(client: anthropic.Anthropic, server: RunningServer) -> None:
    system = "Never was a longer story told than this one here. " * 4
    asked: dict[str, Any] = {"model": MODEL, "system": system, "max_tokens": 2}
    first = client.messages.create(**asked, messages=[{"role": "user", "content": "one"}])
    assert first.usage.cache_read_input_tokens == 0
    with client.messages.stream(**asked, messages=[{"role": "user", "content": "two"}]) as stream:
        second = stream.get_final_message()
    read = second.usage.cache_read_input_tokens or 0
    num_prompt = len(server.client.added[-1].prompt_token_ids)
    assert read >= 32 and read % 16 == 0 and second.usage.input_tokens == num_prompt - read


def test_volatile_lines_spare_the_cache(client: anthropic.Anthropic, server: RunningServer) -> None:
    """The lines that agents change with each request are no part of prompts; others stay."""

    def ask(number: int, request_id: str) -> list[int]:
        client.messages.create(
            model=MODEL, messages=ASKED, max_tokens=1, extra_body={"request_id": request_id},
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cc=2; cch={number}f;"},
                {"type": "text", "text": "You are an agent."},
                {"type": "text", "text": f"Be brief.\n<total_tokens>{number} tokens left"},
            ],
        )  # fmt: skip
        return server.client.added[-1].prompt_token_ids.tolist()

    first = ask(190000, "volatile-1")
    assert first == ask(180000, "volatile-2")
    reply = waiting.get(f"{server.url}/admin/requests/volatile-1")
    assert reply.json()["removed_lines"] == [
        "x-anthropic-billing-header: cc=2; cch=190000f;",
        "<total_tokens>190000 tokens left",
    ]
    kept = "I wrote: x-anthropic-billing-header: 1\n<total_tokens>3 tokens left, I think"
    assert kept in prompt_of(server, client, ASKED, system=kept)


def test_what_is_new_is_noted_and_refuses_nothing(
    client: anthropic.Anthropic, server: RunningServer
) -> None:
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
    client.messages.create(
        model=MODEL, messages=ASKED, max_tokens=1, tools=tools, metadata={"user_id": "u"},
        extra_body={"request_id": "newer", "a_field_of_next_month": {"a": 1}},
    )  # fmt: skip
    ignored = waiting.get(f"{server.url}/admin/requests/newer").json()["ignored"]
    assert ignored == ["metadata", "a_field_of_next_month", "web_search_20250305"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_choices_of_hosted_tools_are_skipped(
    client: anthropic.Anthropic, script: Script, choice: Any
) -> None:
    """Fault: 400 for a choice of a tool that the request has, and that is skipped."""
    tools: Any = [{"type": "web_search_20250305", "name": "web_search"}]
    if choice["type"] == "tool":
        tools += TOOLS
    found = both(client, script, "Warm." + END, tools=tools, tool_choice=choice)
    assert found.stop_reason == "end_turn"


def test_turns_of_one_side_are_one(client: anthropic.Anthropic, server: RunningServer) -> None:
    said = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    client.messages.create(model=MODEL, messages=said, max_tokens=1)  # type: ignore[arg-type]
    tokenizer = server.backend.require().model.front.renderer.tokenizer
    assert tokenizer is not None
    tokens = server.client.added[-1].prompt_token_ids.tolist()
    assert tokenizer.decode(tokens, skip_special_tokens=False).count("<|user|>") == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is \\[\\]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages\\[0\\].role is"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages\\[0\\].content is 5"),
    (
        {"messages": [{"role": "user", "content": [{"type": "odd"}]}]},
        "content\\[0\\].type is",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"extra_body": {"temperature": -1}}, "temperature"),
    ({"tool_choice": {"type": "any"}}, "no tools"),
    ({"tool_choice": {"type": "odd"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "absent"}}, "absent"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools\\[0\\]"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens is missing"),
    ({"thinking": {"type": "odd"}}, "thinking.type"),
    ({"output_config": {"effort": "odd"}}, "effort"),
    ({"output_config": {"effort": []}}, "effort"),
    ({"output_config": {"format": {"type": "odd"}}}, "format.type"),
    ({"stop_sequences": ["x"] * 99}, "max_stop"),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests(client: anthropic.Anthropic, given: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": 5, **given}
    with pytest.raises(anthropic.BadRequestError, match=words) as found:
        client.messages.create(**asked)
    body: Any = found.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == found.value.response.headers["request-id"]


def test_other_errors_have_their_types(client: anthropic.Anthropic, server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="absent", messages=ASKED, max_tokens=5)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()
    reply = waiting.post(f"{server.url}/v1/messages", json={"model": MODEL})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    reply = waiting.get(f"{server.url}/v1/messages")
    assert (reply.status_code, reply.json()["type"]) == (405, "error")


def test_an_error_within_a_stream(server: RunningServer, client: anthropic.Anthropic) -> None:
    server.call(lambda: setattr(server.client, "fail_after", 3))
    with (
        pytest.raises(anthropic.APIStatusError, match="engine was lost"),
        client.messages.stream(model=MODEL, messages=ASKED, max_tokens=50) as stream,
    ):
        for _ in stream:
            pass


def test_keys_and_an_engine_that_starts() -> None:
    settings = ServerSettings(api_key=("secret",), disable_access_log=True)
    with running_server(bundled_front(), settings) as server:
        for given in ({"api_key": "secret"}, {"auth_token": "secret", "api_key": None}):
            with _client(server.url, **given) as client:
                client.messages.create(model=MODEL, messages=ASKED, max_tokens=1)
        with _client(server.url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as found:
                client.messages.create(model=MODEL, messages=ASKED, max_tokens=1)
            assert found.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        server.call(server.backend.drain)
        with _client(server.url, api_key="secret") as client:
            with pytest.raises(anthropic.APIStatusError) as busy:
                client.messages.create(model=MODEL, messages=ASKED, max_tokens=1)
            assert busy.value.status_code == 529
            assert busy.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


def test_models(client: anthropic.Anthropic, server: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "other-name"]
    found = client.models.retrieve("other-name")
    check_complete(found)
    assert found.lifecycle == "active" and found.max_input_tokens == 512
    plain = waiting.get(f"{server.url}/v1/models").json()["data"][0]
    assert "lifecycle" not in plain
