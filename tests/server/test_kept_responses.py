"""The Responses API through the official client: kept conversations, and responses made in the
background."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from quire.engine.model_front import ModelFront
from quire.server.generation.history import continued
from quire.server.requests.limits import Limits
from quire.server.responses import turns
from quire.server.responses.turns import fewest_dropped, turn_starts
from quire.server.settings import ServerSettings
from tests import waiting
from tests.server.in_memory import InMemoryClient
from tests.server.responses import (
    ASKED,
    CALL,
    END,
    THOUGHT,
    TOOLS,
    both,
    comparable,
    last_prompt,
    new_client,
    prompt_of,
)
from tests.server.running import MODEL, RunningServer, bundled_front, running_server
from tests.server.scripted import Script, hermes_front
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    return hermes_front(tmp_path_factory.mktemp("hermes"))


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


def test_items_of_answers_are_referred_to(
    client: openai.OpenAI, script: Script, server: RunningServer
) -> None:
    """Fault: clients of the Vercel AI SDK, which sends earlier answers so, get no second answer."""
    first = client.responses.create(
        model=MODEL, input=ASKED, tools=TOOLS,
        extra_body={"seed": script.tell(THOUGHT + "I look." + CALL + END)},
    )  # fmt: skip
    question = {"role": "user", "content": ASKED}
    call = first.output[2]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18"}
    thought, *said = [{"type": "item_reference", "id": item.id} for item in first.output]
    given: Any = [question, {**thought, "type": None}, *said, result]
    shown = prompt_of(server, client, given, tools=TOOLS)
    whole: Any = [question, *(item.to_dict() for item in first.output), result]
    assert shown == prompt_of(server, client, whole, tools=TOOLS)
    assert "They ask" in shown and "I look." in shown and "result: 18" in shown
    count = client.responses.input_tokens.count(model=MODEL, input=given, tools=TOOLS)
    assert count.input_tokens == len(server.client.added[-1].prompt_token_ids)
    (asked,) = client.responses.input_items.list(
        client.responses.create(model=MODEL, input=[thought], max_output_tokens=1).id  # type: ignore[list-item]
    )
    assert asked.id == thought["id"] and asked.type == "reasoning"
    unknown = [{**thought, "id": each} for each in ("rs_x", "msg_00_1", f"{thought['id']}0")]
    for wrong in (*([each] for each in unknown), [thought, thought]):
        with pytest.raises(openai.NotFoundError, match="There is no item") as found:
            client.responses.create(model=MODEL, input=wrong)  # type: ignore[arg-type]
        assert found.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="id is missing"):
        client.responses.create(model=MODEL, input=[{"type": "item_reference"}])  # type: ignore[list-item]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="There is no item"):
        client.responses.create(model=MODEL, input=given, tools=TOOLS)


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
        new_client(server.url) as client,
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
        new_client(server.url, "one") as one,
        new_client(server.url, "two") as two,
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
        new_client(server.url, "one") as one,
        new_client(server.url, "two") as two,
    ):
        made = one.responses.create(model=MODEL, input=ASKED, max_output_tokens=1)
        assert one.responses.retrieve(made.id).id == made.id
        for use in (two.responses.retrieve, two.responses.delete, two.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                use(made.id)
        with pytest.raises(openai.NotFoundError):
            two.responses.create(model=MODEL, input="x", previous_response_id=made.id)
