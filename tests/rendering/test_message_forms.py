"""Messages reach each way in which templates branch as transformers' renderer would give them.

The oracle is the function under `apply_chat_template`. The method itself removes null values first
in its recent releases, by which a template that asks `content is none` loses the tool calls.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.text.rendering import ChatTemplate
from quire.text.rendering.messages import without_optional_nulls
from tests.dialect.chat_templates import TEMPLATES

Message = dict[str, Any]

SOURCES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "branches").glob("*.jinja"))
}
ROLES = ("system", "user", "assistant", "tool")
MISSING = object()
ONE_PART = [{"type": "text", "text": "uno"}]
TWO_PARTS = [{"type": "text", "text": "uno"}, {"type": "text", "text": "due"}]
CONTENTS = {
    "null": None,
    "empty": "",
    "missing": MISSING,
    "text": "uno",
    "part": ONE_PART,
    "parts": TWO_PARTS,
    "no_parts": [],
}
ARGUMENTS = {"città": "Zürich"}
CALLS = {
    "object": ARGUMENTS,
    "text": json.dumps(ARGUMENTS, ensure_ascii=False),
    "no_arguments": {},
}
# Values of the SDKs of some APIs for each field that a message does not use.
UNUSED = dict.fromkeys(("tool_calls", "reasoning_content", "refusal", "audio", "name"))
WORDS = ("uno", "due", "question", "lookup", "città", "Zürich")
PYTHON = ("[]", "Undefined", "{'", "['", " object at 0x", "<generator", "dict_")
WHOLE = ('"type": "text"', r"{\"")


def message(role: str, content: object = MISSING, **fields: Any) -> Message:
    given = {} if content is MISSING else {"content": content}
    return {"role": role, **given, **fields}


def calls(arguments: object) -> list[Message]:
    function = {"name": "lookup", "arguments": arguments}
    return [{"id": "abcdefghi", "type": "function", "function": function}]


ASK = message("user", "question")
CALL = message("assistant", "", tool_calls=calls(ARGUMENTS))


def conversation(given: Message) -> list[Message]:
    """One in which such a message may stand."""
    before = {"system": [], "user": [], "assistant": [ASK], "tool": [ASK, CALL]}
    return [*before[given["role"]], given, *([ASK] if given["role"] == "system" else [])]


CASES: dict[str, Message] = {
    **{
        f"{role}-{label}": message(role, content)
        for role in ROLES
        for label, content in CONTENTS.items()
    },
    **{
        f"{role}-{label}-unused": message(role, CONTENTS[label], **UNUSED)
        for role in ROLES
        for label in ("text", "empty", "parts")
    },
    **{
        f"calls-{form}-{label}": message("assistant", content, tool_calls=calls(arguments))
        for form, arguments in CALLS.items()
        for label, content in CONTENTS.items()
    },
    "calls-unused": message("assistant", None, **{**UNUSED, "tool_calls": calls(ARGUMENTS)}),
    "reasoning": message("assistant", "uno", reasoning_content="due"),
    "reasoning-null": message("assistant", None, reasoning="due", reasoning_content=None),
}


def forms_of_content(content: object, role: str) -> list[object]:
    """Return the forms that may stand for a content, the unchanged one first."""
    nothing = [""] if role in ("assistant", "tool") else []
    if content is None:
        return [None, MISSING, *nothing]
    if isinstance(content, str):
        return [content, [{"type": "text", "text": content}]]
    if isinstance(content, list):
        text = "\n".join(part["text"] for part in content)
        return [content, text, *([[{"type": "text", "text": text}]] if content else [])]
    return [MISSING, *nothing]


def forms_of_call(arguments: object) -> list[object]:
    if isinstance(arguments, str):
        return [arguments, json.loads(arguments)]
    return [arguments, json.dumps(arguments, ensure_ascii=False)]


def forms_of(given: Message) -> Iterator[Message]:
    """The messages that may stand for this one; those that are more like it come first."""
    rest = {key: value for key, value in given.items() if key not in ("content", "tool_calls")}
    others = [rest, {key: value for key, value in rest.items() if value is not None}]
    called: list[Message] = [{}]
    if given.get("tool_calls"):
        arguments = given["tool_calls"][0]["function"]["arguments"]
        called = [{"tool_calls": calls(form)} for form in forms_of_call(arguments)]
    elif "tool_calls" in given:
        called = [{"tool_calls": None}, {}]
    contents = forms_of_content(given.get("content", MISSING), given["role"])
    for content, fields, tool_calls in itertools.product(contents, others, called):
        yield message(content=content, **fields, **tool_calls)


class Oracle:
    """transformers' renderer; None for a refusal."""

    def __init__(self) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template

    def render(self, source: str, messages: list[Message]) -> str | None:
        try:
            rendered = self._render(conversations=[messages], chat_template=source)
        except Exception:  # noqa: BLE001 (it raises whatever the template raises)
            return None
        return rendered[0][0]

    def expected(self, source: str, given: list[Message]) -> str | None:
        """The prompt that shows most of the messages, of the forms that may stand for them: the
        first whose prompt has no value as Python or JSON shows it. A null content is no text; other
        nulls that would be printed count as missing. None if each form is refused."""
        best: str | None = None
        for chat in itertools.product(*map(forms_of, given)):
            text = self.render(source, list(chat))
            if text is None or any(sign in text for sign in (*PYTHON, *WHOLE)):
                continue
            if "None" in text and without_optional_nulls(list(chat)) is not None:
                continue
            if best is None or num_words(text) > num_words(best):
                best = text.replace("None", "")
        return best


def num_words(text: str) -> int:
    return sum(text.count(word) for word in WORDS)


@pytest.fixture(scope="session")
def oracle(transformers: Any) -> Oracle:
    assert transformers is not None
    return Oracle()


@pytest.mark.parametrize("name", SOURCES)
def test_messages_are_given_as_transformers_gives_them(name: str, oracle: Oracle) -> None:
    """Fault: a template's branch for null, missing, text or parts is not taken, or a form that it
    can't take is printed as Python shows it."""
    template = ChatTemplate(SOURCES[name])
    wrong: dict[str, tuple[str | None, str | None]] = {}
    for label, given in CASES.items():
        chat = conversation(given)
        expected = oracle.expected(SOURCES[name], chat)
        try:
            found = template.render(chat, add_generation_prompt=False)
        except RequestError:
            found = None
        if found != expected:
            wrong[label] = (found, expected)
    assert not wrong


def render(source: str, chat: list[Message], **options: Any) -> str:
    return ChatTemplate(source).render(chat, add_generation_prompt=False, **options)


def test_null_content_shows_the_calls() -> None:
    """Fault: the history of a conversation loses its tool calls, and nobody is told."""
    chat = [ASK, message("assistant", None, tool_calls=calls(ARGUMENTS))]
    shown = '<user>question<calls>lookup:{"città": "Zürich"}</calls>'
    assert render(SOURCES["is_none"], chat) == shown


VALUES = {
    "none": "",
    "[none, 'é', true, 1]": '[null, "é", true, 1]',
    "{'a': [none]}": '{"a": [null]}',
    "('a', missing)": '["a", null]',
    "{'a': 1}.keys()": '["a"]',
    "{'a': 1}.items()": '[["a", 1]]',
    "range(3)": "[0, 1, 2]",
    "missing": "",
    "true": "True",
    "1.5": "1.5",
}
WAYS_TO_PRINT = (
    "{{ X }}",
    "{% set x = X %}{{ x }}",
    "{% set x %}{{ X }}{% endset %}{{ x }}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(X) }}",
    "{{ X if true else '' }}",
    "{{ '' ~ X }}",
    "{{ X | string }}",
    "{{ X | trim }}",
    "{{ [X] | map('string') | join }}",
    "{{ [X, ''] | join('') }}",
    "{{ [{'a': X}] | join(attribute='a') }}",
    "{{ X | replace('no such', '') }}",
    "{{ X | pprint }}",
    "{{ '%s' % ((X),) }}",
    "{{ '%(a)s' % {'a': X} }}",
    "{{ '%s' | format(X) }}",
    "{{ '{}'.format(X) }}",
    "{{ '{a!s}'.format(a=X) }}",
    "{{ '{a}'.format_map({'a': X}) }}",
    "{{ X | safe }}",
    "{% filter trim %}{{ X }}{% endfilter %}",
)


@pytest.mark.parametrize("way", WAYS_TO_PRINT)
def test_no_value_is_printed_as_python_shows_it(way: str) -> None:
    """Fault: a prompt has `None`, or the `repr` of a list."""
    shown = {value: render(way.replace("X", value), [ASK]) for value in VALUES}
    assert shown == VALUES


@pytest.mark.parametrize(
    "value",
    [
        "messages | map(attribute='role')",
        "namespace(a=1)",
        "messages[0].keys",
        "raise_exception",
        "cycler('a')",
        "[namespace(a=1)]",
        "[messages | map(attribute='role')]",
    ],
)
def test_what_has_no_text_is_refused(value: str) -> None:
    """Fault: a prompt has the address of an object, another one in each run."""
    with pytest.raises(RequestError, match=r"prints a value of the type|can't be printed"):
        render("{{ " + value + " }}", [ASK])


def test_null_has_no_items() -> None:
    """Fault: a template that goes through the parts of any content fails for a null one."""
    chat = [message("assistant", None, tool_calls=calls(ARGUMENTS))]
    for source, text in (
        ("{% for part in messages[0].content %}{{ part }}{% else %}none{% endfor %}", "none"),
        ("{{ 'x' in messages[0].content }}", "False"),
        ("{{ 'x' not in messages[0].content }}", "True"),
        ("{{ messages[0].content | length }}", "0"),
        ("{{ messages[0].content | selectattr('type') | list | length }}", "0"),
        ("{{ messages[0].content | first is defined }}", "False"),
        ("{{ messages[0].content is none and messages[0].content is defined }}", "True"),
        ("{{ messages[0].content == none and messages[0].content is not iterable }}", "True"),
        ("{{ messages[0].content | tojson }}", "null"),
    ):
        assert render(source, chat) == text, source


def test_null_of_an_optional_field() -> None:
    """Fault: `tool_calls: null` hides the content, since it is taken for a call; or a template
    that asks whether it is null is not told so."""
    calls_or_content = (
        "{% for m in messages %}{% if m.tool_calls is defined %}{% for call in m.tool_calls %}"
        "{{ call.function.name }}{% endfor %}{% elif m.content is none %}nothing{% else %}"
        "{{ m.content }}{% endif %};{% endfor %}"
    )
    chat = [
        message("assistant", None, tool_calls=calls({})),
        message("assistant", "uno", tool_calls=None),
        message("assistant", None, tool_calls=None),
    ]
    assert render(calls_or_content, chat) == "lookup;uno;nothing;"
    asks = "{% for m in messages %}{{ m.tool_calls is none }} {{ m.name is defined }};{% endfor %}"
    assert render(asks, [message("user", "", tool_calls=None, name=None)]) == "True True;"
    strict = (
        "{% for m in messages %}{% if 'tool_calls' in m and m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(strict, [message("assistant", "uno", tool_calls=None)]) == "uno"
    with pytest.raises(RequestError, match="one call"):
        render(strict, [message("assistant", "uno", tool_calls=[], name=None)])


def test_content_form_of_each_role() -> None:
    """Fault: all roles get the content that one role's branch takes."""
    template = ChatTemplate(SOURCES["by_role"])
    forms = {role: template.content_form(role=role) for role in ROLES}
    assert forms == {"system": "string", "user": "parts", "assistant": "either", "tool": "string"}
    parts = [message(role, TWO_PARTS) for role in ("system", "user", "assistant", "tool")]
    shown = "<<SYS>>uno\ndue<</SYS>>[INST]unodue[/INST]unodue[RESULT]uno\ndue[/RESULT]"
    assert template.render(parts, add_generation_prompt=False) == shown
    with pytest.raises(RequestError, match=r"messages\[0\].*'image'.*takes text only"):
        template.render([message("system", [{"type": "image"}])])


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "text"}, 'must have a string "text"'),
        ({"type": "text", "text": None}, 'must have a string "text"'),
        ({"type": "text", "text": 5}, 'must have a string "text"'),
        ({}, "takes text only"),
        (5, "takes text only"),
    ],
)
def test_malformed_parts(part: Any, words: str) -> None:
    """Fault: a part without text is an internal error."""
    with pytest.raises(RequestError, match=words):
        render("{{ messages[0].content }}", [message("user", [part])])


def test_refusals_of_the_model_are_text() -> None:
    """Fault: an answer that clients send back as a refusal is lost."""
    chat = [message("assistant", [{"type": "refusal", "refusal": "uno"}])]
    assert render("{{ messages[0].content }}", chat) == "uno"
    assert render("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", chat) == "uno"


@pytest.mark.parametrize("content", [5, {"a": 1}, True])
def test_only_text_is_continued(content: Any) -> None:
    """Fault: a content that is no text is continued as Python shows it."""
    with pytest.raises(RequestError, match="not a text"):
        render("{{ messages[0].content }}", [message("user", content)], continue_final_message=True)


SYSTEM = "{% if m.role == 'system' %}[S]{{ m.content }}{% endif %}"
TURNS = (
    "{% if m.role == 'user' %}[U]{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}[A]{{ m.content }}{% endif %}"
)
FIRST = "{% for m in messages[:1] %}" + SYSTEM + "{% endfor %}"
LATER = "{% for m in messages[1:] %}" + SYSTEM + "{% endfor %}"
ALL_TURNS = "{% for m in messages %}" + TURNS + "{% endfor %}"
STRICT = (
    "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('second') }}{% endfor %}"
)
ASKED = [message("user", "q"), message("assistant", "a")]
INSTRUCTED = [message("system", "one"), message("developer", "two"), *ASKED]
BETWEEN = [message("developer", "one"), *ASKED, message("system", "two"), message("user", "r")]


@pytest.mark.parametrize(
    ("source", "instructed", "between"),
    [
        (FIRST + LATER + ALL_TURNS, "[S]one[S]two[U]q[A]a", "[S]one[S]two[U]q[A]a[U]r"),
        (FIRST + ALL_TURNS, "[S]one\n\ntwo[U]q[A]a", "[S]one[U]q[A]a[U]two\n\nr"),
        (STRICT + FIRST + ALL_TURNS, "[S]one\n\ntwo[U]q[A]a", "[S]one[U]q[A]a[U]two\n\nr"),
        (ALL_TURNS, "[U]one\n\ntwo\n\nq[A]a", "[U]one\n\nq[A]a[U]two\n\nr"),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            "[system]one[developer]two[user]q[assistant]a",
            "[developer]one[user]q[assistant]a[system]two[user]r",
        ),
    ],
    ids=["everywhere", "first", "refused", "nowhere", "any role"],
)
def test_instructions_are_shown(source: str, instructed: str, between: str) -> None:
    """Fault: templates of Qwen3, GLM and Granite have no branch for a developer, or for a system
    message between turns, and what it says is lost."""
    template = ChatTemplate(source)
    assert template.render(INSTRUCTED) == instructed
    assert template.render(BETWEEN) == between


def test_instructions_without_a_question_behind_them() -> None:
    template = ChatTemplate(FIRST + ALL_TURNS)
    last = [ASKED[0], message("developer", ONE_PART), message("system", "two")]
    assert template.render(last) == "[U]q\nuno\ntwo"
    assert template.render([*ASKED, message("system", "two")]) == "[U]q[A]a[U]two"
    with pytest.raises(RequestError, match="takes text only"):
        template.render([*ASKED, message("system", 5), message("user", ONE_PART)])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}",
        "{% for m in messages %}{{ (m.content | first).text }}{% endfor %}",
        "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}",
    ],
)
def test_a_template_that_shows_one_part_gets_all_texts_in_it(source: str) -> None:
    """Fault: the second part of a message is lost without a word."""
    assert render(source, [message("user", TWO_PARTS)]) == "uno\ndue"
    assert render(source, [message("user", "uno")]) == "uno"
    with pytest.raises(RequestError, match="'image'"):
        render(source, [message("user", [*ONE_PART, {"type": "image"}])])


CONCATENATES = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"


@pytest.mark.parametrize(
    "given",
    [
        message("assistant", None, tool_calls=calls({})),
        message("assistant", None, reasoning_content="due"),
        message("assistant", None, refusal=None),
        message("assistant"),
    ],
)
def test_a_template_that_takes_no_null_gets_an_empty_content(given: Message) -> None:
    """Fault: "can only concatenate str" for an answer that clients send back as it came."""
    assert render(CONCATENATES, [ASK, given, ASK]) == "user:question;assistant:;user:question;"


BROKEN = {
    '{"city": "Os': "Os",
    '{"city": "Os", "days": [1, {"n': "Os",
    '{"city": "Os", "days"': "Os",
    '{"city": Os}': "Os",
    '["Os"]': "Os",
    "Os": "Os",
    '"{\\"city\\": \\"Os\\"}"': "Os",
    '{"city": "Os\\': "",
    "{": "",
    "null": "",
}
"""Arguments that are no JSON object, and what of them is shown."""


def templates_of_calls() -> dict[str, str]:
    folder = Path(__file__).parent / "templates"
    found = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.jinja")}
    return {**SOURCES, **found, **{f"form {name}": text for name, (_, text) in TEMPLATES.items()}}


@pytest.mark.parametrize(
    ("name", "source"), templates_of_calls().items(), ids=lambda each: each[:20]
)
def test_broken_arguments_of_earlier_calls_are_shown(name: str, source: str) -> None:
    """Fault: a call that `max_tokens` cut, and that the client sends back, ends a conversation."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    result = message("tool", "done", tool_call_id="abcdefghi", name="lookup")

    def shown(arguments: object) -> str | None:
        chat = [ASK, message("assistant", None, tool_calls=calls(arguments)), result, ASK]
        try:
            return template.render(chat)
        except RequestError:
            return None

    whole = shown('{"city": "Os"}')
    for arguments, part in BROKEN.items():
        found = shown(arguments)
        assert (found is None) == (whole is None), (name, arguments)
        if found is not None and whole is not None and "Os" in whole:
            assert part in found, (name, arguments)
