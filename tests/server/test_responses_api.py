"""The Responses API through the official client: items, streams, tools, reasoning, and what is
kept."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from quire.dialect import CallArguments, CallStart, Reasoning, Text
from quire.engine.model_front import ModelFront
from quire.server.generation.history import continued
from quire.server.requests.limits import Limits
from quire.server.responses import turns
from quire.server.responses.items import ItemReader
from quire.server.responses.tools import GivenTools
from quire.server.responses.turns import fewest_dropped, turn_starts
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.in_memory import InMemoryClient
from tests.server.running import MODEL, RunningServer, bundled_front, running_server
from tests.server.scripted import Script, hermes_front
from tests.waiting import WAIT_S, wait_for

ASKED = "How warm is it in Rome?"
CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
THOUGHT = "<think>\nThey ask for the weather.\n</think>\n\n"
END = "<|end|>"
TOOLS: Any = [
    {
        "type": "function",
        "name": "Weather",
        "description": "The weather of a place.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    }
]
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


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    return hermes_front(tmp_path_factory.mktemp("hermes"))


@pytest.fixture
def script(server: RunningServer, front: ModelFront) -> Iterator[Script]:
    with Script(server, front) as found:
        yield found


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with _client(server.url) as found:
        yield found
    server.wait_until_idle()


def _client(url: str, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=api_key,
        max_retries=0,
        timeout=WAIT_S,
        _strict_response_validation=True,
    )


def both(client: openai.OpenAI, script: Script, text: str, **given: Any) -> Response:
    """The answer that the model is told to give, which a stream builds too."""
    asked: dict[str, Any] = {"model": MODEL, "input": ASKED, "max_output_tokens": 200, **given}
    whole = client.responses.create(**asked, extra_body={"seed": script.tell(text)})
    with client.responses.stream(**asked, extra_body={"seed": script.tell(text)}) as stream:
        events = list(stream)
    check_events(events)
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert comparable(last.response) == comparable(whole)
    return whole


def check_events(events: list[Any]) -> None:
    """Numbers, and one item after the other: added, its content, done with the same id."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert {event.response.id for event in events if hasattr(event, "response")} == {
        events[0].response.id
    }
    item = None
    count = itertools.count()
    for event, kind in list(zip(events, kinds, strict=True))[2:-1]:
        if kind == "output_item.added":
            assert item is None and event.output_index == next(count)
            item = event.item
        elif kind == "output_item.done":
            assert item is not None and (event.item.id, event.item.type) == (item.id, item.type)
            item = None
        else:
            assert item is not None and event.item_id == item.id
    assert item is None or kinds[-1] == "failed"


def comparable(response: Response) -> dict[str, Any]:
    found = json.loads(response.to_json())
    for item in found["output"]:
        for name in ("id", "call_id"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    names = ("output", "status", "incomplete_details", "error", "model", "text", "tools")
    usage = {n: v for n, v in found["usage"].items() if n != "input_tokens_details"}
    return {**{name: found.get(name) for name in names}, "usage": usage}


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
    ignored = ["prompt_cache_key", "client_metadata", "web_search", "image_generation"]
    assert timeline["ignored"] == ignored
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.json()["id"])


def test_calls_of_a_namespace_name_it(client: openai.OpenAI, script: Script) -> None:
    namespace = {"type": "namespace", "name": "files", "description": "", "tools": TOOLS}
    (call,) = both(client, script, CALL + END, tools=[namespace]).output
    assert call.type == "function_call" and call.namespace == "files"


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


def prompt_of(server: RunningServer, client: openai.OpenAI, given: Any, **others: Any) -> str:
    """The prompt that the engine got."""
    client.responses.create(model=MODEL, input=given, max_output_tokens=1, **others)
    return last_prompt(server)


def last_prompt(server: RunningServer) -> str:
    tokenizer = server.backend.require().model.front.renderer.tokenizer
    assert tokenizer is not None
    tokens = server.client.added[-1].prompt_token_ids.tolist()
    return tokenizer.decode(tokens, skip_special_tokens=False)


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


def test_a_conversation_goes_on_from_what_is_kept(
    client: openai.OpenAI, script: Script, server: RunningServer
) -> None:
    """The prompt is that of the whole conversation; instructions are not inherited."""
    first = client.responses.create(
        model=MODEL, input=ASKED, tools=TOOLS, instructions="Be kind.",
        extra_body={"seed": script.tell(THOUGHT + CALL + END)},
    )  # fmt: skip
    call = first.output[1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18"}
    second = client.responses.create(
        model=MODEL, input=[result], previous_response_id=first.id, tools=TOOLS,
        extra_body={"seed": script.tell("18 degrees." + END)},
    )  # fmt: skip
    prompt = last_prompt(server)
    assert "Be kind." not in prompt and "result: 18" in prompt and "They ask" in prompt
    third = client.responses.create(
        model=MODEL, input="And in Oslo?", previous_response_id=second.id, tools=TOOLS,
        max_output_tokens=1,
    )  # fmt: skip
    assert third.previous_response_id == second.id
    shown = last_prompt(server)
    assert prompt in shown and "18 degrees.<|end|><|user|>And in Oslo?" in shown
    whole = [
        {"role": "user", "content": ASKED},
        *(item.to_dict() for item in first.output),
        result,
        *(item.to_dict() for item in second.output),
        {"role": "user", "content": "And in Oslo?"},
    ]
    assert prompt_of(server, client, whole, tools=TOOLS) == shown


def test_tokens_stay_as_the_model_wrote_them(
    client: openai.OpenAI, script: Script, server: RunningServer, front: ModelFront
) -> None:
    """A model may spell a word in other tokens than the tokenizer: the cache still knows them."""
    letters = [token for letter in "It is warm." for token in script.ids(letter)]
    assert letters != script.ids("It is warm.")
    seed = script.tell("x")
    script._told[seed] = [*letters, *script.ids(END)]
    story = "Tell me of Rome, of Oslo and of the places between them, please. " * 2
    first = client.responses.create(model=MODEL, input=story, extra_body={"seed": seed})
    before = [*server.client.added[-1].prompt_token_ids.tolist(), *letters, *script.ids(END)]
    second = client.responses.create(
        model=MODEL, input="Go on.", previous_response_id=first.id, max_output_tokens=1,
        extra_body={"request_id": "kept-tokens"},
    )  # fmt: skip
    prompt = server.client.added[-1].prompt_token_ids.tolist()
    assert prompt[: len(before)] == before
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens == (len(before) - 1) // 16 * 16
    timeline = waiting.get(f"{server.url}/admin/requests/kept-tokens").json()
    assert timeline["num_history_tokens"] == timeline["num_kept_tokens"] == len(before)


def test_long_conversations_go_on_beside_the_loop(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: all streams stand still while the tokens of a long conversation are compared."""
    threads: list[str] = []

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return continued(*given)

    monkeypatch.setattr(turns, "continued", watched)
    last: str | None = None
    for text in ("hi", "return " * 300):
        made = client.responses.create(
            model=MODEL, input=text, max_output_tokens=1, previous_response_id=last
        )
        last = made.id
    assert threads == ["render"]


def test_a_template_that_drops_text_wins(
    client: openai.OpenAI, script: Script, server: RunningServer
) -> None:
    """The template writes thinking in another form: the prompt is what it writes, and the timeline
    says how many tokens stayed."""
    odd = "<think>They ask.</think>Warm." + END
    first = client.responses.create(model=MODEL, input=ASKED, extra_body={"seed": script.tell(odd)})
    client.responses.create(
        model=MODEL, input="Go on.", previous_response_id=first.id, max_output_tokens=1,
        extra_body={"request_id": "template-wins"},
    )  # fmt: skip
    assert "<think>\nThey ask.\n</think>\n\nWarm." in last_prompt(server)
    timeline = waiting.get(f"{server.url}/admin/requests/template-wins").json()
    assert 0 < timeline["num_kept_tokens"] < timeline["num_history_tokens"]


def test_kept_responses_are_read_and_deleted(client: openai.OpenAI, script: Script) -> None:
    made = both(client, script, "It is warm." + END)
    assert comparable(client.responses.retrieve(made.id)) == comparable(made)
    items = client.responses.input_items.list(made.id)
    (item,) = items.data
    assert item.type == "message" and not items.has_more
    client.responses.delete(made.id)
    for use in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            use(made.id)
    with pytest.raises(openai.NotFoundError) as found:
        client.responses.create(model=MODEL, input="x", previous_response_id=made.id)
    assert found.value.param == "previous_response_id"


def test_pages_of_items(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    made = client.responses.create(model=MODEL, input=given, max_output_tokens=1)
    pages = client.responses.input_items.list(made.id, limit=2, order="asc")
    texts = [item.content[0].text for item in pages]  # type: ignore[union-attr]
    assert len(pages.data) == 2 and pages.has_more and texts == ["0", "1", "2", "3", "4"]
    newest = client.responses.input_items.list(made.id, limit=1).data[0]
    assert newest.content[0].text == "4"  # type: ignore[union-attr]
    for limit in (0, "0" * 5000 + "10", "1" + "0" * 5000, "١"):
        with pytest.raises(openai.BadRequestError, match="limit is"):
            client.responses.input_items.list(made.id, limit=limit)  # type: ignore[arg-type]


def test_tokens_are_counted(client: openai.OpenAI, server: RunningServer) -> None:
    asked: Any = {"model": MODEL, "input": ASKED, "tools": TOOLS, "instructions": "Hi."}
    counted = client.responses.input_tokens.count(**asked).input_tokens
    client.responses.create(**asked, max_output_tokens=1)
    assert counted == len(server.client.added[-1].prompt_token_ids)


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(
    client: openai.OpenAI, server: RunningServer
) -> None:
    turns: list[Any] = []
    for number in range(12):
        turns.append({"role": "user", "content": f"{number}: " + "word " * 60})
        turns.append({"role": "assistant", "content": f"answer {number}"})
    turns.append({"role": "user", "content": ASKED})
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(model=MODEL, input=turns, max_output_tokens=9)
    shown = prompt_of(
        server, client, turns, truncation="auto", instructions="Stay.",
        extra_body={"request_id": "too-long"},
    )  # fmt: skip
    assert "Stay." in shown and ASKED in shown and "answer 11" in shown and "answer 0<" not in shown
    timeline = waiting.get(f"{server.url}/admin/requests/too-long").json()
    assert 0 < timeline["num_dropped_turns"] < 12


@pytest.mark.parametrize("highest", [0, 1, 2, 1000])
def test_turns_are_dropped_in_few_attempts(highest: int) -> None:
    """Fault: the conversation was rendered once for each turn that was dropped."""
    for wanted in {0, 1, 2, 700, highest} & set(range(highest + 1)):
        asked: list[int] = []

        async def attempt(
            number: int, wanted: int = wanted, asked: list[int] = asked
        ) -> str | None:
            asked.append(number)
            return str(number) if number >= wanted else None

        assert asyncio.run(fewest_dropped(attempt, highest)) == (str(wanted), wanted)
        assert len(asked) <= 12 and len(set(asked)) == len(asked)


def test_conversations_begin_at_the_users_messages() -> None:
    roles = ["system", "developer", "assistant", "tool", "user", "assistant", "system", "user"]
    assert turn_starts([{"role": role} for role in roles]) == [2, 4, 7]
    assert turn_starts([{"role": "system"}]) == []


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "messages"),
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


def test_the_background(client: openai.OpenAI, server: RunningServer) -> None:
    made = client.responses.create(model=MODEL, input=ASKED, background=True, max_output_tokens=30)
    assert made.status in ("queued", "in_progress") and made.background

    def done() -> Response | None:
        found = client.responses.retrieve(made.id)
        return None if found.status in ("queued", "in_progress") else found

    found: Any = wait_for(done, "end of the response")
    assert found.usage is not None and found.usage.output_tokens > 0
    assert client.responses.cancel(made.id).status == found.status


def test_a_response_in_the_background_is_cancelled() -> None:
    engine = InMemoryClient()
    engine.paused = True
    limits = Limits(max_background_responses=1)
    settings = ServerSettings(disable_access_log=True, limits=limits)
    with (
        running_server(bundled_front(), settings, engine) as server,
        _client(server.url) as client,
    ):
        made = client.responses.create(model=MODEL, input=ASKED, background=True)
        server.wait_until_open()
        with pytest.raises(openai.InternalServerError, match="max_background_responses"):
            client.responses.create(model=MODEL, input=ASKED, background=True)
        wait_for(
            lambda: client.responses.retrieve(made.id).status == "in_progress", "its beginning"
        )
        with pytest.raises(openai.BadRequestError, match="is in_progress"):
            client.responses.create(model=MODEL, input="x", previous_response_id=made.id)
        assert client.responses.cancel(made.id).status == "cancelled"
        wait_for(lambda: server.call(lambda: engine.num_unfinished) == 0, "end of the request")
        assert client.responses.retrieve(made.id).status == "cancelled"
        engine.paused = False
        server.wait_until_idle()
        plain = client.responses.create(model=MODEL, input=ASKED, max_output_tokens=1)
        with pytest.raises(openai.BadRequestError, match="not made in the background"):
            client.responses.cancel(plain.id)


def test_each_key_has_its_own_room_in_the_background() -> None:
    """Fault: one caller takes all of `max_background_responses`."""
    engine = InMemoryClient()
    engine.paused = True
    limits = Limits(max_requests_per_key=2)
    settings = ServerSettings(api_key=("one", "two"), disable_access_log=True, limits=limits)
    with (
        running_server(bundled_front(), settings, engine) as server,
        _client(server.url, "one") as one,
        _client(server.url, "two") as two,
    ):
        asked: Any = {"model": MODEL, "input": ASKED, "background": True, "max_output_tokens": 1}
        first = [one.responses.create(**asked) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="max_requests_per_key"):
            one.responses.create(**asked)
        assert two.responses.create(**asked).status == "queued"
        one.responses.cancel(first[0].id)

        def has_room() -> bool:
            try:
                return one.responses.create(**asked).status == "queued"
            except openai.RateLimitError:
                return False

        wait_for(has_room, "room for another one")
        engine.paused = False
        server.wait_until_idle()


def test_each_key_sees_its_own() -> None:
    settings = ServerSettings(api_key=("one", "two"), disable_access_log=True)
    with (
        running_server(bundled_front(), settings) as server,
        _client(server.url, "one") as one,
        _client(server.url, "two") as two,
    ):
        made = one.responses.create(model=MODEL, input=ASKED, max_output_tokens=1)
        assert one.responses.retrieve(made.id).id == made.id
        for use in (two.responses.retrieve, two.responses.delete, two.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                use(made.id)
        with pytest.raises(openai.NotFoundError):
            two.responses.create(model=MODEL, input="x", previous_response_id=made.id)
