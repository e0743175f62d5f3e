"""Chat templates of many styles, compared with transformers; refusals and the sandbox's limits."""

import datetime
import enum
import itertools
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError, RequestError
from quire.text.rendering import RESERVED_KWARGS, ChatTemplate
from quire.text.rendering.chat_template.sandbox import TemplateLimits

SOURCES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
NOW = datetime.datetime(2025, 3, 9, 12, 30, tzinfo=datetime.UTC)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather <now> & "later"',
        "parameters": {
            "type": "object",
            "properties": {
                "städte": {"type": "array", "items": {"type": "string"}},
                "unit": {"type": ["string", "null"], "enum": ["°C", "°F"]},
                "days": {"type": "integer"},
            },
            "required": ["städte"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be kind.\n"}
ASK = {"role": "user", "content": "  Hi, 你好 👋 <b>&amp;\n\nbye  "}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello! "}
AGAIN = {"role": "user", "content": "And now?"}
REASONED = {"role": "assistant", "content": "42", "reasoning_content": "six by seven"}
ARGUMENTS = {"städte": ["Zürich", "东京"], "days": 3, "quoted": "it's"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abc123def",
            "type": "function",
            "function": {"name": "get_weather", "arguments": ARGUMENTS},
        }
    ],
}
RESULT = {"role": "tool", "content": '{"°C": 21}', "tool_call_id": "abc123def", "name": "x"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [ASK],
    "system": [SYSTEM, ASK],
    "many": [SYSTEM, ASK, ANSWER, AGAIN],
    "answered": [ASK, ANSWER, AGAIN, REASONED],
    "not_alternating": [ASK, AGAIN],
    "tools": [SYSTEM, ASK, CALL, RESULT],
    "two_results": [ASK, CALL, RESULT, RESULT, ANSWER, AGAIN],
    "short_id": [ASK, {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "1"}]}, RESULT],
    "other_role": [ASK, {"role": "critic", "content": "no"}],
}


@pytest.mark.parametrize(
    ("name", "known"),
    [("smollm", ["function"]), ("llama31_tools", ["ipython"]), ("glm", ["observation"])],
)
def test_roles_that_a_template_knows(name: str, known: list[str]) -> None:
    """Fault: a template that writes any role opens a turn that the model never saw."""
    source = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()
    template = ChatTemplate(source, SPECIAL)
    for role in ("system", "user", "assistant", "developer", "tool", *known):
        template.check_roles([ASK, {"role": role, "content": "x"}])
    with pytest.raises(RequestError, match="'martian'"):
        template.check_roles([ASK, {"role": "martian", "content": "x"}])


class FrozenClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return NOW


@pytest.fixture(scope="session")
def oracle(folders: dict[str, Path], transformers: Any) -> Any:
    """A transformers tokenizer with the special tokens `SPECIAL`."""
    return transformers.AutoTokenizer.from_pretrained(folders["llama3"])


@pytest.fixture(autouse=True)
def _frozen_clock(monkeypatch: pytest.MonkeyPatch, transformers: Any) -> None:
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", FrozenClock)


def ours(name: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(SOURCES[name], SPECIAL, now=lambda: NOW, **options)


def outcome(render: Callable[..., str], *args: Any, **kwargs: Any) -> str | None:
    """The rendered text, None for a refusal."""
    try:
        return render(*args, **kwargs)
    except Exception:  # noqa: BLE001 (the oracle raises whatever the template raises)
        return None


@pytest.mark.parametrize("name", SOURCES)
def test_render_equals_transformers(name: str, oracle: Any) -> None:
    """Fault: a prompt that differs from the one the model was trained on, even by a space."""
    template = ours(name)
    num_rendered = 0
    for (label, messages), tools, generate in itertools.product(
        CONVERSATIONS.items(), (None, [TOOL, TOOL]), (True, False)
    ):
        if name == "deepseek" and any("tool_calls" in message for message in messages):
            continue  # it takes arguments as text only, where the oracle fails on an object
        given: list[dict[str, Any]] = messages
        if name == "llava_parts":
            given = [
                {**m, "content": [{"type": "image"}, {"type": "text", "text": m["content"]}]}
                for m in messages
                if m["content"]
            ]
        if name == "nemotron" and messages[0] is SYSTEM:  # it would pass over the system
            both = f"{SYSTEM['content']}\n\n{ASK['content']}"
            given = [{"role": "user", "content": both}, *messages[2:]]

        filled = [{**m, "content": m["content"] or ""} for m in given]
        text = next(
            (
                found
                for each in (given, filled)  # some templates take no null
                if (
                    found := outcome(
                        oracle.apply_chat_template,
                        each,
                        tools=tools,
                        chat_template=SOURCES[name],
                        tokenize=False,
                        add_generation_prompt=generate,
                    )
                )
                is not None
            ),
            None,
        )
        shown = given if name == "llava_parts" else messages
        found = outcome(template.render, shown, tools, add_generation_prompt=generate)
        assert found == text, (label, tools is not None, generate)
        num_rendered += text is not None
    assert num_rendered >= 8


# `nemotron` prints the length of the text, in which the end mark counts.
@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"nemotron"}))
def test_continue_final_message_equals_transformers(name: str, oracle: Any) -> None:
    """Fault: an end-of-turn token after the message that is to be continued."""
    template = ours(name)
    num_rendered = 0
    for last in ("Sure, ", "Sure,", "a\n\n", " b "):
        messages = [ASK, {"role": "assistant", "content": last}]
        if name == "llava_parts":
            messages = [
                {**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages
            ]

        text = outcome(
            oracle.apply_chat_template,
            messages,
            chat_template=SOURCES[name],
            tokenize=False,
            continue_final_message=True,
        )
        found = outcome(
            template.render, messages, add_generation_prompt=False, continue_final_message=True
        )
        assert found == text, last
        num_rendered += text is not None
    assert num_rendered


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3", {"enable_thinking": True}),
        ("glm", {"enable_thinking": False}),
        ("gpt_oss", {"reasoning_effort": "high"}),
        ("llama31_tools", {"date_string": "1 Jan 2000"}),
        ("granite", {"controls": {"length": "short"}}),
        ("chatml", {"unknown_to_the_template": [1, {"a": None}]}),
    ],
)
def test_template_variables_equal_transformers(
    name: str, kwargs: dict[str, Any], oracle: Any
) -> None:
    """Fault: `chat_template_kwargs` do not reach the template."""
    expected = oracle.apply_chat_template(
        [ASK], chat_template=SOURCES[name], tokenize=False, add_generation_prompt=True, **kwargs
    )
    assert ours(name).render([ASK], **kwargs) == expected


@pytest.mark.parametrize("name", ["command_r", "granite"])
def test_documents_equal_transformers(name: str, oracle: Any) -> None:
    """Fault: retrieved documents are lost."""
    documents = [{"title": "A", "text": "one"}, {"title": "B", "text": "zwei ü"}]
    expected = oracle.apply_chat_template(
        [ASK],
        documents=documents,
        chat_template=SOURCES[name],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ours(name).render([ASK], documents=documents) == expected
    assert "zwei ü" in expected


def test_messages_are_left_as_they_are() -> None:
    """Fault: rendering changes the caller's messages (the next turn is built on them)."""
    messages = [ASK, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    copy = [dict(message) for message in messages]
    ours("gemma3_parts").render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == copy
    assert messages[1]["content"] == [{"type": "text", "text": "x"}]


def test_content_forms() -> None:
    """Fault: a list of parts is printed as Python code, or text is spelled out letter by letter."""
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    text = [{"role": "user", "content": "a"}]
    assert ours("chatml").content_form() == "string"
    assert "user\na\nb<|im_end|>" in ours("chatml").render(parts)
    assert ours("llava_parts").content_form() == "parts"
    assert ours("llava_parts").render(text) == "USER: a ASSISTANT:"
    assert ours("gemma3_parts").content_form() == "either"
    assert ">user\nab<end" in ours("gemma3_parts").render(parts)
    assert ours("llama31_tools").content_form() == "string"
    with pytest.raises(RequestError, match=r"'image'.*takes text only"):
        ours("chatml").render([{"role": "user", "content": [{"type": "image"}]}])


def test_tool_arguments_in_both_forms() -> None:
    """Fault: arguments as JSON text (what OpenAI clients send back) are encoded twice, or a
    template that wants text fails on an object."""
    import json

    function = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}
    as_text = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    for name in ("qwen25", "qwen3", "hermes_tools", "glm", "gpt_oss"):
        assert ours(name).render([ASK, as_text]) == ours(name).render([ASK, CALL])
    shown = ours("deepseek").render([ASK, CALL])
    assert "```json\n" + json.dumps(ARGUMENTS, ensure_ascii=False) + "\n```" in shown


def test_reasoning_under_any_name() -> None:
    """Fault: reasoning sent back under another API's name is dropped."""
    for field in ("reasoning", "thinking", "reasoning_content"):
        messages = [ASK, {"role": "assistant", "content": "42", field: "six by seven"}]
        assert "<think>\nsix by seven\n</think>" in ours("qwen3").render(messages)
        assert "analysis<|message|>six by seven" in ours("gpt_oss").render(messages)
        reads_short = ChatTemplate("{% for m in messages %}{{ m.reasoning }}{% endfor %}")
        assert "six by seven" in reads_short.render([*messages, {**messages[-1], "thinking": None}])


def test_tool_use_template_is_chosen() -> None:
    """Fault: tools are ignored because the model keeps a template of its own for them."""
    template = ChatTemplate({"default": "plain", "tool_use": "with tools", "rag": "rag"})
    assert template.render([ASK]) == "plain"
    assert template.render([ASK], [TOOL]) == "with tools"
    assert template.render([ASK], [TOOL], template_name="rag") == "rag"
    with pytest.raises(RequestError, match=r"'other'.*default, rag, tool_use"):
        template.render([ASK], template_name="other")


@pytest.mark.parametrize("name", [*sorted(RESERVED_KWARGS - {"self"}), "bos_token", "not a name"])
def test_reserved_variables(name: str) -> None:
    """Fault: a request changes the template, the tokens, or how the result is returned."""
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        ours("chatml").check_kwargs({name: True})


def test_refusals_carry_the_templates_words() -> None:
    """Fault: the user gets a traceback, or no reason."""
    with pytest.raises(RequestError, match="no system role"):
        ours("gemma").render([SYSTEM, ASK])
    with pytest.raises(RequestError, match="both true"):
        ours("chatml").render([ASK], continue_final_message=True)
    for template, words in (
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception(messages[0].content) }}", "Hi, 你好"),
        ("{{ raise_exception('no' * 9999) }}", r"^.{1,600}$"),
    ):
        with pytest.raises(RequestError, match=words):
            ChatTemplate(template).render([ASK])


@pytest.mark.parametrize(
    "messages",
    [[], "text", {"role": "user"}, [3], [{"content": "x"}], [{"role": 3, "content": "x"}], None],
)
def test_malformed_messages(messages: Any) -> None:
    """Fault: a malformed conversation is an internal error."""
    with pytest.raises(RequestError):
        ours("chatml").render(messages)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x | no_such_filter }}", "{% if x %}", "{{ 'a }}", "{% unknown %}"]
)
def test_syntax_error_is_found_at_load(source: str) -> None:
    """Fault: a broken template is found by the first user."""
    with pytest.raises(ConfigError, match="'default' has an error"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ (messages | attr('__class__')) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ namespace.__init__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% set messages[0] = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ dict.__base__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ (messages | map('attr', '__class__') | list)[0].__name__ }}",
    ],
)
def test_sandbox_escapes_fail(source: str) -> None:
    """Fault: a downloaded template reaches Python internals."""
    try:
        text = ChatTemplate(source).render([ASK])
    except (RequestError, ConfigError):
        return
    assert "class" not in text and "function" not in text and "module" not in text


DOUBLING = (
    "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x STEP {% endfor %}{{ ns.x }}"
)
DOUBLING_STEPS = (
    "= ns.x ~ ns.x %}",
    "= ns.x + ns.x %}",
    "= ns.x * 2 %}",
    "= '%s%s' % (ns.x, ns.x) %}",
    "= '{0}{0}'.format(ns.x) %}",
    "= [ns.x, ns.x] | join %}",
    "= ns.x | replace('x', 'xx') %}",
    "= ns.x.replace('x', 'xx') %}",
    "= ns.x.join(['', '', '']) %}",
    "%}{{ ns.x }}{{ ns.x }}{% endset %}",
)
# Lists that occur twice in each other: a little memory, and 2^60 items for what goes through them.
NESTED = (
    "{% set ns = namespace(x=['x'], y=['x'], z=('x',)) %}{% for a in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% set ns.z = (ns.z, ns.z) %}"
    "{% endfor %}USE"
)
USES_OF_NESTED = (
    "{{ ns.x }}",
    "{{ ns }}",
    "{{ ns.x ~ '' }}",
    "{{ ns.x | tojson }}",
    "{{ '%s' % ns.x }}",
    "{{ '{}'.format(ns.x) }}",
    "{{ ns.x == ns.y }}",
    "{{ ns.x is eq(ns.y) }}",
    "{{ [ns.x].count(ns.y) }}",
    "{{ [ns.x] | map('string') | list }}",
    "{{ [ns.x] | select | map('string') | list }}",
    "{{ [ns.x] | join }}",
    "{{ {'a': ns.x}.values() | string }}",
    "{{ {ns.z: 1} }}",
    "{{ {}[ns.z] }}",
    "{{ {}.get(ns.z) }}",
    "{{ raise_exception(ns.x) }}",
)
LIMITS = TemplateLimits(max_characters=200_000, max_steps=200_000, max_seconds=1.0)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ range(1000000000) | list }}",
        "{{ 9 ** 999999999 }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        *(DOUBLING.replace("STEP", step) for step in DOUBLING_STEPS),
        "{{ ([range(50000)|list] * 500) | sum(start=[]) | length }}",
        "{{ ((((9**64)**64)**64)**32) > 5 }}",
        "{% set ns = namespace(x=9**60) %}{% for i in range(18) %}{% set ns.x = ns.x * ns.x %}"
        "{% endfor %}{{ ns.x > 3 }}",
        "{{ ('f' * 100000) | int(base=16) // 3 }}",
        "{{ ('\t' * 9999).expandtabs(tabsize=9999) }}",
        "{{ ('\n' * 9999) | indent(9999) }}",
        "{{ ('x' * 9999).translate({120: 'y' * 9999}) }}",
        "{{ '%9999d' * 9999 % ((1,) * 9999) }}",
        "{{ ('%(a)s' * 9999) % {'a': 'x' * 9999} }}",
        "{{ ('{0}' * 9999).format('x' * 9999) }}",
        "{{ ('{0[0]}' * 9999).format(['x' * 9999]) }}",
        "{{ ''.join((['x' * 99999] * 9999) | map('string')) }}",
        "{{ ('x' * 99999).join('y' * 99999) }}",
        "{{ ('a' * 190000).rfind('b' + 'a' * 90000) }}",
        "{{ ('a' * 190000).strip('b' * 90000 + 'a') }}",
        "{{ ('a' * 190000) | trim('b' * 90000 + 'a') }}",
        "{{ 'x'.encode().ljust(1000000000) }}",
        *(NESTED.replace("USE", use) for use in USES_OF_NESTED),
        "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(9999) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_runaway_templates_are_stopped(source: str) -> None:
    """Fault: a template holds a processor or the memory (each of these would, unlimited)."""
    with pytest.raises(RequestError):
        ChatTemplate(source, limits=LIMITS).render([ASK])


def test_ordinary_templates_stay_far_below_the_limits() -> None:
    """Fault: the limits refuse long, honest conversations."""
    messages = [ASK, ANSWER] * 5000
    for name in ("qwen3", "hermes_tools", "llama2", "mistral_v3"):
        assert len(ours(name).render(messages)) > 100_000


def test_plain_data_only() -> None:
    """Fault: a template calls methods of the objects in a message."""

    class Role(enum.StrEnum):
        USER = "user"

    class Danger:
        def run(self) -> str:
            return "ran"

    text = ChatTemplate("{{ messages[0].role }} {{ messages[0].content }}").render(
        [{"role": Role.USER, "content": Danger()}]
    )
    assert text == "user <Danger>"
    with pytest.raises(RequestError):
        ChatTemplate("{{ messages[0].content.run() }}").render(
            [{"role": "user", "content": Danger()}]
        )


@pytest.mark.parametrize(
    "body",
    [
        "{% set y = x | sort %}",
        "{% set y = 7 in x %}",
        "{% set y = x == x[:] %}",
        "{% set y = x[1:] %}",
        "{% set y = 7 is in(x) %}",
    ],
)
def test_what_goes_through_long_values_counts(body: str) -> None:
    """A loop of a few rounds must not take a minute for want of steps to count."""
    source = "{% set x = [0] * 400000 %}{% for i in range(2000) %}" + body + "{% endfor %}done"
    with pytest.raises(RequestError, match="more than 30000 steps"):
        ChatTemplate(source, limits=TemplateLimits(max_steps=30_000)).render([ASK])


@pytest.mark.parametrize(
    "body",
    [
        "{% set ns.x = [ns.x, 'y' * 9000 ~ i] %}",
        "{% set ns.x = (ns.x, [i, i, i] * 999) %}",
        "{% set ns.x = {'a': ns.x, 'b': messages | tojson | upper} %}",
        "{% set ns.x = [ns.x, 9 ** 60 * 9 ** 60, range(9) | map('string')] %}",
        "{% set ns.x = [ns.x, ('z' * 999)[1:]] %}",
        "{% set y %}{{ 'z' * 999 }}{{ i }}{% endset %}{% set ns.x = [ns.x, y] %}",
        "{% set ns.x = [ns.x, namespace(a=i)] %}",
        "{% set ns.x = [ns.x, f(i)] %}",
        "{% set ns.x = ('a ' * 60000).split() %}",
        "{% set ns.x = ('a ' * 60000).split(' ') %}",
        "{% set ns.x = ('\r' * 60000).splitlines() %}",
        "{% set ns.x = ('\u8a9e' * 60000) | list %}",
        "{% set ns.x = ('\u8a9e' * 60000) | sort %}",
        "{% set ns.x = ns.x[:] + [i] %}",
    ],
)
def test_what_a_template_builds_is_bounded_in_total(body: str) -> None:
    """Fault: values that are small one by one fill the memory."""
    source = (
        "{% set ns = namespace(x=[]) %}{% macro f(i) %}{{ i }}{{ 'z' * 999 }}{% endmacro %}"
        "{% for i in range(90000) %}" + body + "{% endfor %}done"
    )
    limits = TemplateLimits(max_built_bytes=8 << 20, max_seconds=30.0)
    template = ChatTemplate(source, limits=limits)
    tracemalloc.start()
    with pytest.raises(RequestError, match="more than 8388608 bytes in total"):
        template.render([ASK])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20


LONG_TEXT = "{% set x = 'ab c' * 4000000 %}"
LONG_LIST = "{% set x = range(99999) | list * 10 %}"
WORDS = "{% set x = ('ab c ' * 400000).split() %}"
OBJECTS = "{% set x = [{'a': 1, 'b': [1.5]}] * 400000 %}"


@pytest.mark.parametrize(
    "source",
    [
        LONG_LIST + "{{ x | sum }}",
        LONG_LIST + "{{ x | sort | first }}",
        LONG_LIST + "{{ x | max }}",
        LONG_LIST + "{{ x | tojson | length }}",
        LONG_LIST + "{{ x | tojson(indent=64) | length }}",
        LONG_LIST + "{{ (x ~ '') | length }}",
        LONG_LIST + "{{ [x, x, x] == [x, x, x] }}",
        LONG_LIST
        + "{% for i in x %}{% if BODY %}{% endif %}{% endfor %}".replace(
            "BODY", " or ".join(["x.a.b"] * 40)
        ).replace("x.a.b", "messages[0].none.a is defined"),
        LONG_TEXT + "{{ x | wordcount }}",
        LONG_TEXT + "{{ x | urlencode | length }}",
        LONG_TEXT + "{{ x.split() | length }}",
        "{{ ('é' * 16000000).translate({97: 'b'}) | length }}",
        "{{ ('a\n' * 4000000) | indent(1) | length }}",
        "{{ ('a' * 99999) | wordwrap(1) | length }}",
        WORDS + "{{ x | sort | first }}",
        WORDS + "{{ x | unique | list | length }}",
        WORDS + "{{ x | map('upper') | list | length }}",
        WORDS + "{{ x | join(',') | length }}",
        OBJECTS + "{{ x | groupby('a') | length }}",
        OBJECTS + "{{ x | sort(attribute='a,b.0,a,b.0,a') | length }}",
        OBJECTS + "{{ x | tojson(sort_keys=true) | length }}",
        OBJECTS + "{{ x | selectattr('a', 'equalto', 2) | list | length }}",
        "{{ ('{}' * 90000).format(*range(90000)) | length }}",
    ],
)
def test_the_time_limit_holds_within_one_call(source: str) -> None:
    """Fault: a template that spends its time in one filter is stopped long after its time."""
    limits = TemplateLimits(max_seconds=0.5)
    template = ChatTemplate(source, limits=limits)
    started = time.thread_time()  # never more than on the clock that the limit is for
    outcome(template.render, [ASK])
    assert time.thread_time() - started < 2 * limits.max_seconds


def test_the_time_limit_holds_for_a_template_of_a_request() -> None:
    """Fault: probing a template takes its time once for each form of a message."""
    slow = "{% for i in range(9000) %}{% set x = 'a ' * 9000 %}{% endfor %}{{ messages }}"
    limits = TemplateLimits(max_seconds=0.5)
    started = time.thread_time()
    outcome(ChatTemplate(slow, limits=limits).render, [ASK])
    assert time.thread_time() - started < 2 * limits.max_seconds
