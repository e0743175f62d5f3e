"""Messages of all routes: every JSON type in every place is taken, or refused by that place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.base.errors import ConfigError, RequestError
from quire.engine.model_front import ModelFront
from quire.server.prefixes.files import read_prefix_files
from quire.text.rendering import Renderer, check_messages
from quire.text.rendering.message_check import REASONING_FIELDS
from tests.server.test_hostile import HOST, KIND, Answer, Site

MISSING = object()
VALUES: tuple[Any, ...] = (
    MISSING, None, True, False, 0, 5, -1.5, "", "x", [], [5], [None], ["x"], [[]], [{}],
    {}, {"a": 1}, {"type": "text"}, {"type": "image_url", "image_url": {"url": "data:"}},
)  # fmt: skip
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "a"}

Body = Callable[[Any], Any]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_optional_text(value: Any) -> bool:
    return value in (MISSING, None) or is_text(value)


def is_content(value: Any) -> bool:
    return is_text(value) or value == ["x"]


def is_optional_content(value: Any) -> bool:
    return value in (MISSING, None) or value == [] or is_content(value)


def in_message(message: dict[str, Any], name: str) -> Body:
    def body(value: Any) -> Any:
        fields = {
            key: item for key, item in {**message, name: value}.items() if item is not MISSING
        }
        return [USER, fields]

    return body


def in_part(part: dict[str, Any], name: str) -> Body:
    def body(value: Any) -> Any:
        fields = {key: item for key, item in {**part, name: value}.items() if item is not MISSING}
        return [USER, {"role": "user", "content": [fields]}]

    return body


def in_call(name: str, *, flat: bool = False) -> Body:
    def body(value: Any) -> Any:
        call: dict[str, Any] = {"id": "1", "type": "function", "arguments": "{}", "name": "f"}
        inner = {"name": "f", "arguments": "{}"}
        if not flat:
            call = {"id": "1", "type": "function", "function": inner}
        target = inner if not flat and name in inner else call
        target[name] = value
        if value is MISSING:
            del target[name]
        return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    return body


CALLED = "messages[1].tool_calls[0]"
# Place → the messages with a value there, and which values may stand there.
PLACES: dict[str, list[tuple[Body, Callable[[Any], bool]]]] = {
    "messages": [(lambda value: value, lambda value: False)],
    "messages[1]": [(lambda value: [USER, value], lambda value: False)],
    "messages[1].role": [(in_message(USER, "role"), lambda value: value == "x")],
    "messages[1].content": [
        *((in_message({"role": role}, "content"), is_content)
          for role in ("user", "system", "developer")),
        *((in_message({"role": role}, "content"), is_optional_content)
          for role in ("assistant", "critic")),
        (in_message({"role": "tool"}, "content"), lambda value: value == [] or is_content(value)),
    ],
    "messages[1].content[0]": [
        (lambda value: [USER, {"role": "user", "content": [value]}], is_text),
        (lambda value: [USER, {"role": "assistant", "content": [value]}], is_text),
    ],
    "messages[1].content[0].type": [
        (in_part({"text": "x"}, "type"), lambda value: value is MISSING),
    ],
    "messages[1].content[0].text": [
        (in_part({}, "text"), is_text),
        (in_part({"type": "text"}, "text"), is_text),
        (in_part({"type": "input_text"}, "text"), is_text),
        (in_part({"type": "refusal", "refusal": "x"}, "text"), lambda value: True),
    ],
    "messages[1].content[0].refusal": [(in_part({"type": "refusal"}, "refusal"), is_text)],
    **{
        f"messages[1].{name}": [(in_message(ANSWER, name), is_optional_text)]
        for name in ("name", "tool_call_id", "refusal", *REASONING_FIELDS)
    },
    "messages[1].audio": [(in_message(ANSWER, "audio"), lambda value: value in (MISSING, None))],
    "messages[1].tool_calls": [
        (in_message(ANSWER, "tool_calls"), lambda value: value in (MISSING, None) or value == []),
    ],
    CALLED: [(lambda value: [USER, {**ANSWER, "tool_calls": [value]}], lambda value: False)],
    f"{CALLED}.id": [(in_call("id"), is_optional_text)],
    f"{CALLED}.type": [(in_call("type"), is_optional_text)],
    f"{CALLED}.function": [(in_call("function"), lambda value: False)],
    f"{CALLED}.function.name": [(in_call("name"), is_text)],
    f"{CALLED}.function.arguments": [
        (in_call("arguments"), lambda value: is_optional_text(value) or isinstance(value, dict)),
    ],
    f"{CALLED}.name": [(in_call("name", flat=True), is_text)],
    f"{CALLED}.arguments": [
        (in_call("arguments", flat=True),
         lambda value: is_optional_text(value) or isinstance(value, dict)),
    ],
    "messages[1].function_call": [
        (in_message(ANSWER, "function_call"), lambda value: value in (MISSING, None)),
    ],
}  # fmt: skip
# Where a value stands in a list, or for all, nothing is not an option.
WHOLE = ("messages", "messages[1]", "messages[1].content[0]", CALLED)
CASES = [
    (place, body, value, allows(value))
    for place, forms in PLACES.items()
    for body, allows in forms
    for value in VALUES
    if value is not MISSING or place not in (*WHOLE, f"{CALLED}.name")
]


def check_words(place: str, value: Any, message: str) -> None:
    """The place, or one within the value that stands there; the value; what to do."""
    assert message.startswith(place), message
    if message.startswith((f"{place} is ", f"{place}.type is ")) and value != []:
        shown = "missing" if value is MISSING else json.dumps(value)
        inner = value.get("type") if isinstance(value, dict) else None
        assert f" is {shown}." in message or f' is "{inner}".' in message, message
    assert ". Send " in message or "Leave it out." in message, message
    assert "dict" not in message and "None" not in message


def outcome(messages: Any) -> str:
    try:
        check_messages(messages, text_only=True)
    except RequestError as error:
        return str(error)
    return ""


def test_every_type_in_every_place() -> None:
    for place, body, value, is_allowed in CASES:
        found = outcome(body(value))
        assert (found == "") == is_allowed, (place, value, found)
        if not is_allowed:
            check_words(place, value, found)


@pytest.fixture(scope="module")
def site(front: ModelFront) -> Iterator[Site]:
    found = Site(front)
    with found.runner:
        yield found


def ask(site: Site, path: str, fields: dict[str, Any]) -> Answer:
    return site.ask("POST", path, [HOST, KIND], [json.dumps(fields).encode()])


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"max_tokens": 1}),
        ("/v1/chat/completions", {"max_tokens": 1, "stream": True}),
        ("/tokenize", {}),
        ("/admin/prefixes", {"ttl_s": 1}),
    ],
    ids=lambda value: str(value).strip("/"),
)
def test_all_routes_refuse_alike(site: Site, path: str, more: dict[str, Any]) -> None:
    """The template may still refuse messages that the check allows, in its own words."""
    for place, body, value, is_allowed in CASES:
        messages = body(value)
        if path != "/v1/chat/completions" and messages is None:
            continue  # there, null is "not given"
        if is_allowed and path == "/admin/prefixes":
            continue
        answer = ask(site, path, {"messages": messages, **more})
        assert answer.status < 500
        if is_allowed:
            assert answer.status == 200 or b'"messages[' not in answer.body, answer.body
            continue
        assert answer.status == 400, (place, value, answer.body)
        error = json.loads(answer.body)["error"]
        assert error["message"] == outcome(messages)
        assert error["param"] == "messages"


def test_files_and_python_refuse_alike(front: ModelFront, tmp_path: Any) -> None:
    file = tmp_path / "messages.json"
    for _, body, value, is_allowed in CASES:
        messages = body(value)
        if is_allowed:
            continue
        file.write_text(json.dumps(messages))
        with pytest.raises(ConfigError) as caught:
            read_prefix_files([str(file)])
        assert outcome(messages) in str(caught.value)
        with pytest.raises(RequestError):
            front.renderer.render_chat(messages)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "user", "content": "hi", "name": 5},
        {"role": "tool", "tool_call_id": "1"},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ],
    ids=str,
)
def test_what_passed_before(site: Site, message: dict[str, Any]) -> None:
    answer = ask(site, "/v1/chat/completions", {"messages": [message], "max_tokens": 1})
    assert answer.status == 400 and b"messages[0]." in answer.body


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "tool", "content": [], "tool_call_id": "1"},
        {"role": "assistant", "content": "a", "annotations": [], "weight": 0.5},
        {"role": "user", "content": ["a", {"type": "text", "text": "b", "cache_control": {}}]},
    ],
    ids=str,
)
def test_what_clients_send_back_is_taken(renderer: Renderer, message: dict[str, Any]) -> None:
    """Fault: the answer of one turn is refused in the next (an OpenAI client sends its nulls)."""
    check_messages([USER, message], text_only=True)
    assert "None" not in (renderer.render_chat([USER, message]).text or "")


@pytest.mark.parametrize("role", ["martian", "critic", "User", "ai", "function"])
def test_a_role_that_the_template_does_not_know_is_refused(renderer: Renderer, role: str) -> None:
    """Fault: the bundled template drops such a message, and others write the role as it is."""
    messages = [USER, {"role": role, "content": "hi"}]
    with pytest.raises(RequestError, match=f"messages has one of the role '{role}'"):
        renderer.render_chat(messages)


@pytest.fixture
def renderer(front: ModelFront) -> Renderer:
    return front.renderer


def test_long_values_are_cut_short() -> None:
    """Fault: a message of megabytes is written out to say that it is wrong."""
    for value in ("x" * 10**6, {"a": "x" * 10**6}, [list(range(10**5))]):
        with pytest.raises(RequestError) as caught:
            check_messages([{"role": "user", "content": {"text": value}}])
        assert len(str(caught.value)) < 200
