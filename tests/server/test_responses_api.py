"""The Responses API through the official client: items, streams, tools and reasoning."""

from __future__ import annotations

import json
import time
from typing import Any, Literal, get_args

import openai
import pytest
from openai.types.responses import (
    ToolChoiceApplyPatch,
    ToolChoiceMcp,
    ToolChoiceShell,
    ToolChoiceTypes,
)
from openai.types.responses.response_input_item import ResponseInputItem
from pydantic import BaseModel

from quire.base.errors import RequestError
from quire.engine.model_front import ModelFront
from quire.plan.grammar.trial import _judge
from quire.protocol.grammar import GrammarSpec
from quire.server.openai.tools import asked_tools
from quire.server.requests.bodies import ChatRequest
from quire.server.requests.errors import RefusedError
from quire.server.responses.items import ItemReader
from quire.server.responses.tools import GivenTools, given_tools
from quire.text.dialect import CallArguments, CallStart, Reasoning, Text, answer_grammar
from quire.text.dialect.families import DIALECTS
from quire.text.rendering import Tokenizer
from tests import waiting
from tests.dialect.models import Follower, library, tokenizer
from tests.server.responses import (
    ASKED,
    CALL,
    END,
    THOUGHT,
    TOOLS,
    both,
    check_events,
    prompt_of,
)
from tests.server.running import MODEL, RunningServer
from tests.server.scripted import Script, hermes_front


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    return hermes_front(tmp_path_factory.mktemp("hermes"))


PATCH: Any = [
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Change files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
    }
]
PATCH_CALL = (
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+ \\"a\\""}}'
    "\n</tool_call>"
)


PIN_CALLS = {
    "hermes": '<tool_call>\n{"name": "pin", "arguments": {"input": "%s"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=pin>\n<parameter=input>\n%s\n</parameter>\n</function>\n"
    "</tool_call>",
}


def pin_grammar(name: str, definition: str | None, tokens: Tokenizer) -> GrammarSpec:
    """The answers of a model of a family that has to call a tool with such a text."""
    form = {"type": "grammar", "syntax": "regex", "definition": definition}
    given = given_tools([{"type": "custom", "name": "pin", "format": form}])
    tools = asked_tools(ChatRequest(messages=[], tools=given.functions)).tools
    spec = answer_grammar(DIALECTS[name].bound(tokens), tools, "required")
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", PIN_CALLS)
@pytest.mark.parametrize(
    ("definition", "written"),
    [
        ("[0-9]{4}", "1234"),
        ("^[0-9]{4}$", "1234"),
        ("x|[0-9]{4}", "1234"),
        ("(?i)yes|no", "YES"),
        ("^{x}$", "{x}"),
    ],
)
def test_a_regular_expression_holds_the_whole_text(
    name: str, definition: str, written: str
) -> None:
    """Fault: it matches anywhere in a text that says more, or it is not held."""
    tokens = tokenizer((), ("<tool_call>", "</tool_call>"))
    spec = pin_grammar(name, definition, tokens)
    for text, fits in ((written, True), (f"rm -rf / {written} yes", False), ("x1", False)):
        ids = tokens.encode(PIN_CALLS[name] % text, add_special_tokens=False)
        assert Follower(spec, tokens).accepts(ids) == fits, text


@pytest.mark.parametrize("name", PIN_CALLS)
@pytest.mark.parametrize("definition", ["ab\\b", "a{2}{3}", "(a", "(?=a)a"])
def test_a_regular_expression_that_cannot_be_held_is_refused(name: str, definition: str) -> None:
    tokens = tokenizer((), ("<tool_call>", "</tool_call>"))
    with pytest.raises(RequestError, match=r"pattern|no regular expression"):
        spec = pin_grammar(name, definition, tokens)
        raise RequestError(_judge(library(tokens), -(-tokens.vocab_size // 32), spec).refusal)


def test_a_regular_expression_that_is_missing() -> None:
    with pytest.raises(RefusedError, match=r"tools\[0\].format.definition is missing"):
        pin_grammar("hermes", None, tokenizer())


def test_a_text(client: openai.OpenAI, script: Script) -> None:
    found = both(client, script, "It is warm." + END, metadata={"a": "b"}, instructions="Be kind.")
    assert (found.output_text, found.status) == ("It is warm.", "completed")
    assert [item.type for item in found.output] == ["message"]
    assert found.usage is not None
    assert found.usage.output_tokens == len(script.ids("It is warm." + END))
    assert found.metadata == {"a": "b"} and found.instructions == "Be kind."


def test_an_answer_that_is_cut(client: openai.OpenAI, script: Script) -> None:
    found = both(client, script, "It is warm." + END, max_output_tokens=2)
    assert found.status == "incomplete" and found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output[-1].status == "incomplete"  # type: ignore[union-attr]
    cut = both(client, script, CALL + END, tools=TOOLS, max_output_tokens=len(script.ids(CALL)) - 6)
    assert (cut.status, cut.output[-1].type) == ("incomplete", "function_call")


def test_a_call_after_thinking_and_text(client: openai.OpenAI, script: Script) -> None:
    found = both(client, script, THOUGHT + "I look." + CALL + END, tools=TOOLS)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    thinking, _, call = found.output
    assert thinking.type == "reasoning" and thinking.content
    assert "They ask" in thinking.content[0].text and thinking.encrypted_content is None
    assert call.type == "function_call" and json.loads(call.arguments) == {
        "city": "Rome",
        "days": 2,
    }
    assert found.usage is not None and found.usage.output_tokens_details.reasoning_tokens > 0


def test_several_calls_unless_they_are_forbidden(client: openai.OpenAI, script: Script) -> None:
    text = CALL + "\n" + CALL + END
    found = both(client, script, text, tools=TOOLS)
    assert [item.type for item in found.output] == ["function_call", "function_call"]
    with pytest.raises(openai.APIError):  # the script finds that it is forbidden
        both(client, script, text, tools=TOOLS, parallel_tool_calls=False)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "Weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "Weather"}],
        },
    ],
)
def test_choices_of_tools(client: openai.OpenAI, script: Script, choice: Any) -> None:
    assert both(client, script, CALL + END, tools=TOOLS, tool_choice=choice).status == "completed"
    with pytest.raises(openai.APIError):
        both(client, script, "Warm." + END, tools=TOOLS, tool_choice=choice)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "Weather"}])
def test_a_format_beside_a_call_that_must_come(
    client: openai.OpenAI, script: Script, choice: Any
) -> None:
    """Fault: 400, though the format is about a text that does not come."""
    form: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    found = client.responses.create(
        model=MODEL, input=ASKED, tools=TOOLS, tool_choice=choice, text={"format": form},
        extra_body={"seed": script.tell(CALL + END)},
    )  # fmt: skip
    assert [item.type for item in found.output] == ["function_call"]
    assert found.text is not None and found.text.to_dict()["format"]["name"] == "x"  # type: ignore[index]


def test_a_custom_tool(client: openai.OpenAI, script: Script, server: RunningServer) -> None:
    """Its text is given as it is, and comes back as the function's one argument."""
    found = both(client, script, PATCH_CALL + END, tools=PATCH)
    (call,) = found.output
    assert call.type == "custom_tool_call" and call.input == '*** Begin\n+ "a"'
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    given = [{"role": "user", "content": ASKED}, call.to_dict(), output]
    shown = prompt_of(server, client, given, tools=PATCH)
    assert '"arguments": {"input": "*** Begin\\n+ \\"a\\""}' in shown
    assert "result: done" in shown


def test_what_agents_send_is_no_fault(client: openai.OpenAI, server: RunningServer) -> None:
    """Hosted tools, namespaces, unknown fields, and a probe for one token."""
    namespace = {"type": "namespace", "name": "files", "description": "", "tools": TOOLS}
    tools: Any = [{"type": "web_search"}, namespace, {"type": "image_generation"}]
    reply = waiting.post(
        f"{server.url}/v1/responses",
        json={
            "model": MODEL, "input": [{"role": "user", "content": ""}], "tools": tools,
            "max_output_tokens": 1, "prompt_cache_key": "k", "client_metadata": {"x": "y"},
            "tool_choice": "auto", "parallel_tool_calls": False, "store": False, "include": [],
            "request_id": "agent", "reasoning": {"effort": "medium", "summary": "auto"},
        },
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    timeline = waiting.get(f"{server.url}/admin/requests/agent").json()
    ignored = ["client_metadata", "web_search", "image_generation"]
    assert timeline["ignored"] == ignored
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.json()["id"])


def test_items_of_every_kind_are_read_or_skipped(client: openai.OpenAI) -> None:
    """Fault: the official types know an item that the server refuses, and agents with a history of
    hosted tools are stuck. What has a text for the model is tested on its own."""
    said = {"role": "user", "content": ASKED}
    kinds = {kind for each in get_args(get_args(ResponseInputItem)[0]) for kind in _types(each)}
    own = {"message", "reasoning", "function_call", "function_call_output", "item_reference"}
    own |= {"custom_tool_call", "custom_tool_call_output"}
    assert len(kinds - own) > 20
    items: Any = [said, *({"type": kind, "id": f"x_{kind}"} for kind in sorted(kinds - own))]
    found = client.responses.create(model=MODEL, input=items, max_output_tokens=1)
    bare = client.responses.create(model=MODEL, input=[said], max_output_tokens=1)  # type: ignore[list-item]
    assert found.usage is not None and bare.usage is not None
    assert found.usage.input_tokens == bare.usage.input_tokens


def _types(model: Any) -> list[str]:
    return [kind for kind in get_args(model.model_fields["type"].annotation) if type(kind) is str]


@pytest.mark.parametrize(
    "choice",
    [
        *(
            {"type": kind, "server_label": "x"}
            for each in (ToolChoiceTypes, ToolChoiceMcp, ToolChoiceShell, ToolChoiceApplyPatch)
            for kind in _types(each)
        ),
        {"type": "programmatic_tool_calling"},
        "required",
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]},
    ],
    ids=str,
)
def test_choices_of_hosted_tools_are_skipped(
    client: openai.OpenAI, script: Script, choice: Any
) -> None:
    """Fault: 400 for a choice of a tool that the request may have, and that is skipped."""
    hosted: Any = [{"type": "web_search"}]
    asked: dict[str, Any] = {"model": MODEL, "input": ASKED, "tool_choice": choice}
    seed = {"seed": script.tell("Warm." + END)}
    assert client.responses.create(**asked, tools=hosted, extra_body=seed).output_text == "Warm."
    if choice != "required":
        both_kinds = [*hosted, *TOOLS]
        seed = {"seed": script.tell("Warm." + END)}
        found = client.responses.create(**asked, tools=both_kinds, extra_body=seed)
        assert found.output_text == "Warm."


@pytest.mark.parametrize("choice", [{"type": []}, {"type": "odd"}, {"type": None}])
def test_other_choices_are_refused(client: openai.OpenAI, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice is"):
        client.responses.create(model=MODEL, input=ASKED, tools=TOOLS, tool_choice=choice)


def test_items_change_the_configuration(client: openai.OpenAI, script: Script) -> None:
    """Fault: an item that asks for a format is skipped, and the answer is free text."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    update = {"type": "configuration_update", "text": {"format": form}}
    items: Any = [update, {"role": "user", "content": ASKED}]
    asked: dict[str, Any] = {"model": MODEL, "reasoning": {"effort": "none"}}
    seed = script.tell('{"a": true}' + END)
    found = client.responses.create(**asked, input=items, extra_body={"seed": seed})
    assert found.output_text == '{"a": true}'
    with pytest.raises(openai.APIError):  # the script finds that it is forbidden
        seed = script.tell("Warm." + END)
        client.responses.create(**asked, input=items, extra_body={"seed": seed})
    items.append({"type": "configuration_update", "text": {"format": {"type": "text"}}})
    seed = script.tell("Warm." + END)
    found = client.responses.create(**asked, input=items, extra_body={"seed": seed})
    assert found.output_text == "Warm."


def test_calls_of_a_namespace_name_it(client: openai.OpenAI, script: Script) -> None:
    namespace = {"type": "namespace", "name": "files", "description": "", "tools": TOOLS}
    (call,) = both(client, script, CALL + END, tools=[namespace]).output
    assert call.type == "function_call" and call.namespace == "files"


def search_in(name: str, kind: str = "function") -> dict[str, Any]:
    tool = {"type": kind, "name": "search", "description": f"Search {name}."}
    return {"type": "namespace", "name": name, "description": "", "tools": [tool]}


def test_namespaces_may_have_functions_of_one_name(
    client: openai.OpenAI, script: Script, server: RunningServer
) -> None:
    """Fault: github.search and jira.search were refused, as two tools of one name."""
    tools: Any = [search_in("git hub"), search_in("jira"), *TOOLS]
    call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    answer = both(
        client, script, call % "git_hub__search" + call % "jira__search" + END, tools=tools
    )
    calls: list[Any] = list(answer.output)
    named = [(each.namespace, each.name) for each in calls]
    assert named == [("git hub", "search"), ("jira", "search")]
    given: list[Any] = [{"role": "user", "content": ASKED}]
    given += [each.to_dict() for each in calls]
    given += [
        {"type": "function_call_output", "call_id": each.call_id, "output": "none"}
        for each in calls
    ]
    shown = prompt_of(server, client, given, tools=tools)
    for name in ("git_hub__search", "jira__search"):
        assert shown.count(f'"name": "{name}"') == 2, "as a tool and as a call"
    choice: Any = {"type": "function", "name": "search", "namespace": "jira"}
    (only,) = both(
        client, script, call % "jira__search" + END, tools=tools, tool_choice=choice
    ).output
    assert only.type == "function_call" and only.name == "search"


def test_names_that_the_model_sees() -> None:
    def names(*tools: Any) -> list[str]:
        return [each["function"]["name"] for each in given_tools(list(tools)).functions]

    bare: Any = {"type": "function", "name": "search"}
    assert names(search_in("a")) == ["search"]
    assert names(bare, search_in("a", "custom")) == ["search", "a__search"]
    assert given_tools([bare, search_in("a", "custom")]).custom == {"a__search"}
    assert names(search_in("a b"), search_in("a_b")) == ["a_b__search", "a_b__search_"]
    taken = {"type": "function", "name": "a__search"}
    assert names(taken, bare, search_in("a")) == ["a__search", "search", "a__search_"]
    assert names(search_in("a"), search_in("a"), bare) == ["a__search", "a__search", "search"]


def test_hostile_namespaces_cost_little() -> None:
    """Fault: thousands of namespaces whose names differ in signs alone stop the event loop."""
    started = time.process_time()
    found = given_tools(
        [
            search_in(f"{number:b}".translate({48: " ", 49: "!"}).rjust(13, "?"))
            for number in range(8192)
        ]
    )
    assert len(found.functions) == 8192
    assert time.process_time() - started < 2.0


class Answer(BaseModel):
    degrees: int
    unit: Literal["C", "F"]


def test_the_helper_parses_a_format(client: openai.OpenAI, script: Script) -> None:
    found = client.responses.parse(
        model=MODEL, input=ASKED, text_format=Answer,
        extra_body={"seed": script.tell('{"degrees": 18, "unit": "C"}' + END)},
    )  # fmt: skip
    assert found.output_parsed == Answer(degrees=18, unit="C")


def test_a_format_holds_a_random_model(client: openai.OpenAI) -> None:
    schema = {**Answer.model_json_schema(), "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    for seed in range(3):
        found = client.responses.create(
            model=MODEL, input=ASKED, text=form, extra_body={"seed": seed},
            reasoning={"effort": "none"}, max_output_tokens=100,
        )  # fmt: skip
        if found.status == "completed":
            Answer.model_validate_json(found.output_text)


def test_log_probabilities(client: openai.OpenAI, script: Script) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = both(client, script, THOUGHT + "It is warm." + END, **asked)
    message = found.output[1]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text" and part.logprobs
    assert "".join(each.token for each in part.logprobs).strip() == "It is warm."
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)


def test_log_probabilities_of_tokens_without_text() -> None:
    """Fault: the first tokens of a character, and what stop strings hold back, had none."""
    reader = ItemReader("1", GivenTools(), seals=False)
    events = list(reader.take([Reasoning("Hm.")]))
    events += reader.take([], ["</think>"])
    for parts, logprobs in (
        ([Text("\n")], ["newline"]), ([], ["f0"]), ([Text("🙂")], ["9f"]), ([], ["3"]),
        ([Text("12")], ["4"]), ([], ["last"]),
    ):  # fmt: skip
        events += reader.take(parts, logprobs)
    events += reader.finish()
    deltas = [each["logprobs"] for each in events if each["type"] == "response.output_text.delta"]
    assert deltas == [["newline", "f0", "9f"], ["3", "4"]]
    part = reader.items[1]["content"][0]
    assert part["text"] == "\n🙂12"
    assert part["logprobs"] == ["newline", "f0", "9f", "3", "4", "last"]
    done = next(each for each in events if each["type"] == "response.output_text.done")
    assert done["logprobs"] == part["logprobs"]


def test_log_probabilities_of_marks_are_of_no_message() -> None:
    reader = ItemReader("1", GivenTools(), seals=False)
    events = list(reader.take([Text("Look.")], ["Look."]))
    events += reader.take([], ["<tool_call>"])
    events += reader.take([CallStart(0, "call_1", "f"), CallArguments(0, "{}")])
    events += reader.finish()
    assert reader.items[0]["content"][0]["logprobs"] == ["Look."]
    assert reader.items[1]["arguments"] == "{}"


def test_reasoning_goes_back_sealed_or_open(
    client: openai.OpenAI, script: Script, server: RunningServer
) -> None:
    include: Any = ["reasoning.encrypted_content"]
    found = both(client, script, THOUGHT + "Warm." + END, include=include, store=False)
    thinking = found.output[0]
    assert thinking.type == "reasoning" and thinking.encrypted_content
    user: Any = {"role": "user", "content": ASKED}
    for kept in ({"content"}, {"encrypted_content"}):
        item = {
            name: value
            for name, value in thinking.to_dict().items()
            if name in {"id", "type", "summary"} | kept
        }
        shown = prompt_of(server, client, [user, item, found.output[1].to_dict(), user])
        assert "They ask for the weather." in shown
    more = {**thinking.to_dict(), "content": [{"type": "reasoning_text", "text": " And more."}]}
    shown = prompt_of(server, client, [user, thinking.to_dict(), more, found.output[1].to_dict()])
    assert "They ask for the weather. And more." in shown
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAB=="}
    prompt_of(server, client, [user, foreign, user])


def test_tokens_are_counted(client: openai.OpenAI, server: RunningServer) -> None:
    asked: Any = {"model": MODEL, "input": ASKED, "tools": TOOLS, "instructions": "Hi."}
    counted = client.responses.input_tokens.count(**asked).input_tokens
    client.responses.create(**asked, max_output_tokens=1)
    assert counted == len(server.client.added[-1].prompt_token_ids)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input is empty"),
    ({"input": [{"type": "odd"}]}, r"input\[0\].type is 'odd'"),
    ({"input": [{"role": "odd", "content": "x"}]}, r"input\[0\].role is 'odd'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "takes text only"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "call_id is missing"),
    ({"max_output_tokens": 0}, "max_completion_tokens|max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\].name is missing"),
    ({"tool_choice": "required"}, "no tools"),
    ({"tool_choice": {"type": "odd"}}, "tool_choice is"),
    ({"text": {"format": {"type": "odd"}}}, "text.format.type is 'odd'"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
    ({"reasoning": {"effort": "odd"}}, "reasoning.effort is 'odd'"),
    ({"reasoning": {"effort": []}}, r"reasoning.effort is \[\]"),
    ({"truncation": "odd"}, "truncation is 'odd'"),
    ({"conversation": "c"}, "conversation is given"),
    ({"background": True, "store": False}, "store is False"),
    ({"background": True, "stream": True}, "stream is True"),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests(client: openai.OpenAI, given: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.responses.create(**{"model": MODEL, "input": ASKED, **given})


def test_an_error_within_a_stream(server: RunningServer, client: openai.OpenAI) -> None:
    """The response ends as failed, and is kept so."""
    server.call(lambda: setattr(server.client, "fail_after", 3))
    stream = client.responses.create(model=MODEL, input=ASKED, stream=True, max_output_tokens=60)
    events = list(stream)
    check_events(events)
    last = events[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.code == "server_error"
    assert "engine was lost" in last.response.error.message
    assert client.responses.retrieve(last.response.id).status == "failed"
