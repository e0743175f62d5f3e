"""Ids of calls in a conversation, in the form that a family's template takes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.text.dialect.chat import WholeChats
from quire.text.dialect.conversation import in_call_order, prepared, with_call_ids
from quire.text.dialect.families import DIALECTS
from quire.text.dialect.spec import IdStyle
from quire.text.rendering import ChatTemplate
from tests.dialect.models import tokenizer


def call(name: str, call_id: str | None) -> dict[str, Any]:
    named = {} if call_id is None else {"id": call_id}
    return {**named, "type": "function", "function": {"name": name, "arguments": "{}"}}


def turn(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "x"}


USER = {"role": "user", "content": "q"}
LONG = "call_0123456789abcdef01234567"
TALK = [
    USER,
    turn(call("f", LONG), call("g", "b")),
    result("b"),
    result(LONG),
    turn(call("f", "b")),
]


def ids_of(messages: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return those of calls and those of results."""
    calls = [c["id"] for m in messages for c in m.get("tool_calls", ())]
    return calls, [m["tool_call_id"] for m in messages if "tool_call_id" in m]


def test_random_ids_stay() -> None:
    assert with_call_ids(TALK, IdStyle.RANDOM) == TALK


def test_counted_ids_run_through_the_conversation() -> None:
    calls, results = ids_of(with_call_ids([*TALK, result("b")], IdStyle.COUNTED))
    assert calls == ["functions.f:0", "functions.g:1", "functions.f:2"]
    assert results == ["functions.g:1", "functions.f:0", "functions.f:2"]


def test_short_ids_are_nine_letters_and_digits() -> None:
    calls, results = ids_of(with_call_ids(TALK, IdStyle.SHORT))
    assert all(len(each) == 9 and each.isalnum() for each in calls)
    assert results == [calls[1], calls[0]]
    assert ids_of(with_call_ids([turn(call("f", "aB3456789"))], IdStyle.SHORT))[0] == ["aB3456789"]


@pytest.mark.parametrize("style", [IdStyle.SHORT, IdStyle.COUNTED])
def test_calls_without_an_id_get_one(style: IdStyle) -> None:
    (first, second), _ = ids_of(with_call_ids([turn(call("f", None), call("f", None))], style))
    assert first != second


@pytest.mark.parametrize("style", list(IdStyle))
def test_nothing_is_changed_in_place(style: IdStyle) -> None:
    before = repr(TALK)
    with_call_ids(TALK, style)
    assert repr(TALK) == before


def contents(messages: list[dict[str, Any]]) -> list[object]:
    return [message["content"] for message in messages]


def test_results_are_in_the_order_of_their_calls() -> None:
    """Fault: a template that shows no ids gives one call the result of another."""
    assert [m.get("tool_call_id") for m in in_call_order(TALK)][2:4] == [LONG, "b"]
    three = [turn(*(call("f", each) for each in "abc")), *map(result, "cab"), USER]
    again = [*three, turn(call("g", "a"), call("g", "b")), *map(result, "ba"), result("x")]
    found = [m.get("tool_call_id") for m in in_call_order(again)]
    assert found == [None, "a", "b", "c", None, None, "a", "b", "x"]
    apart = [turn(call("f", "a"), call("f", "b")), result("b"), USER, result("a")]
    assert in_call_order(apart) == apart


NO_ID = {"role": "tool", "content": "x"}
OLDER = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("name", ["generic", "mistral", "kimi_k2"])
@pytest.mark.parametrize("result", [NO_ID, {**NO_ID, "tool_call_id": None}], ids=str)
@pytest.mark.parametrize("asked", [turn(call("f", None), call("g", None)), OLDER], ids=str)
def test_results_without_ids_stay_in_their_order(
    name: str, asked: dict[str, Any], result: dict[str, Any]
) -> None:
    """Fault: a history without ids is an error of the server."""
    results = [{**result, "content": each} for each in "ab"]
    found = prepared([USER, asked, *results, USER], DIALECTS[name])
    assert [str(each).split()[-1] for each in contents(found)[2:]] == ["a", "b", "q"]
    if name != "generic" and asked is not OLDER:
        calls, given = ids_of(found)
        assert given == calls


def test_results_in_words_name_their_calls() -> None:
    """Fault: results name ids that the calls in the prompt do not show."""
    called = turn(call("f", "a"), call("g", "b"), call("f", "c"))
    dialect = DIALECTS["generic"]
    results = [{**result(each), "content": f"of {each}"} for each in "cba"]
    shown = [str(each) for each in contents(prepared([USER, called, *results], dialect))[2:]]
    assert [each.split() for each in shown] == [
        ["(f,", "call", "1):", "of", "a"],
        ["(g):", "of", "b"],
        ["(f,", "call", "2):", "of", "c"],
    ]
    older = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": "{}"},
    }
    said = {"role": "function", "name": "f", "content": "x"}
    found = prepared([USER, older, said], dialect)
    assert [message["role"] for message in found] == ["user", "assistant", "user"]
    assert '"name": "f"' in found[1]["content"] and found[2]["content"].startswith("(f):")
    (lost,) = prepared([result("z")], dialect)
    assert lost["content"].startswith("(z):")


@pytest.mark.parametrize(
    ("names", "titles"),
    [
        (["f", "g", "f"], ["(f, call 1):", "(g):", "(f, call 2):"]),
        (["g", "f", "f"], ["(f, call 1):", "(f, call 2):", "(g):"]),
        (["f", "other"], ["(other):", "(f, call 1):"]),
        ([None, None, None, None], ["(f, call 1):", "(g):", "(f, call 2):", "(the tool):"]),
    ],
    ids=str,
)
def test_results_without_ids_have_names_in_words(names: list[str], titles: list[str]) -> None:
    """Fault: each result is that of the last call."""
    asked = turn(*(call(each, None) for each in "fgf"))
    results = [{**NO_ID, "tool_call_id": None, "name": each} for each in names]
    found = contents(prepared([USER, asked, *results], DIALECTS["generic"]))
    assert sorted(str(each).split("\n")[0] for each in found[2:]) == sorted(titles)


def test_long_turns_take_no_time_and_deep_arguments_no_server() -> None:
    """Fault: the event loop stands still for what a bound refuses later."""
    ids = [f"{i}" for i in range(20_000)]
    talk = [turn(*(call("".join("f_"), each) for each in ids)), *map(result, reversed(ids))]
    started = time.thread_time()
    found = prepared(talk, DIALECTS["generic"])
    assert time.thread_time() - started < 2
    assert found[-1]["content"].startswith("(f_, call 20000):")
    deep = call("f", "a")
    deep["function"]["arguments"] = "[" * 200_000
    (shown,) = prepared([turn(deep)], DIALECTS["generic"])
    assert deep["function"]["arguments"] in shown["content"]


class Sent:
    """Message as an SDK's object; what pydantic makes of it."""

    def __init__(self, message: dict[str, Any]) -> None:
        self._message = message

    def model_dump(self) -> dict[str, Any]:
        return {name: tuple(v) if isinstance(v, list) else v for name, v in self._message.items()}


@pytest.mark.parametrize("name", ["generic", "mistral", "kimi_k2"])
def test_objects_get_ids_and_tools_as_messages_do(name: str) -> None:
    """Fault: ids of calls and described tools are left out where messages are objects."""
    tokens = tokenizer((), ("<tool_call>", "</tool_call>"))
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    tool = {"type": "function", "function": {"name": "f"}}
    dialect = DIALECTS[name].bound(tokens)
    chats = WholeChats(dialect, template, tokens, {1}, [tool])
    objects: list[Any] = [Sent(each) for each in (tool, *TALK)]
    others = WholeChats(dialect, template, tokens, {1}, objects[:1])
    assert others.conversation(objects[1:]) == chats.conversation(TALK)
    for wrong in (["oops"], [{"id": [1], "function": None}]):
        with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[0\]"):
            chats.conversation([USER, {**turn(), "tool_calls": wrong}])
