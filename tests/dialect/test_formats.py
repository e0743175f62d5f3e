"""Answers of models of each family: the grammar takes them, and the parser reads them as they were
meant, however they are cut."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from quire.text.dialect import (
    CallArguments,
    CallStart,
    Dialect,
    NamedTool,
    Text,
    ToolChoice,
    answer_grammar,
)
from quire.text.dialect.families import DIALECTS
from quire.text.dialect.spec import ArgumentStyle
from quire.text.rendering import Tokenizer
from tests.dialect.answers import TOOLS, Answer, parsed, read
from tests.dialect.models import Follower, tokenizer, walk
from tests.dialect.written import WRITERS, encoded, plain
from tests.pairs import LAWS_BY_PAIRS
from tests.profiles import examples

pytestmark = LAWS_BY_PAIRS

NAMES = sorted(name for name, each in DIALECTS.items() if each.style is not ArgumentStyle.CHANNELS)
KINDS = [(name, kind) for name in NAMES for kind in ("special", "added", "text")]
"""Markers as special tokens, as tokens that are text, and as text alone."""
WEATHER = ("get_weather", {"city": "Oslo", "days": 3, "exact": True, "area": [1.5, 2]})
NASTY = (
    'a "quoted" \\ back\\nslash',
    "line\nbreak\u2028sep\u2029 é😀\ttab",
    '</tool_call> <tool_call>\n{"name": "now"',
    "</parameter> <parameter=x> ]}) [now()] '",
    "02134",
    "<think>no</think>",
    "",
)
ANSWERS = [
    Answer("Just text, {no} [call].\n\nTwo\tlines é😀"),
    Answer(calls=(WEATHER,)),
    Answer("Let me look: <tool", calls=(WEATHER,)),
    Answer(calls=(("now", {}), WEATHER, ("now", {}))),
    *(Answer(calls=(("files.write", {"path": "a", "text": text}),)) for text in NASTY),
    Answer(calls=(("get_weather", {"city": "x", "exact": False, "unit": None}),)),
]


def model(name: str, kind: str = "special") -> tuple[Dialect, Tokenizer]:
    family = DIALECTS[name]
    texts = (*family.markers, *(family.thinking or ()), *family.stops)
    tokens = {
        "special": lambda: tokenizer(texts),
        "added": lambda: tokenizer((), texts),
        "text": lambda: tokenizer(),
    }[kind]()
    return family.bound(tokens), tokens


ALL = pytest.mark.parametrize(("name", "kind"), KINDS)


def parsable(name: str, answer: Answer) -> bool:
    """Some families have no text beside calls."""
    return not (DIALECTS[name].is_bare and answer.text and answer.calls)


@ALL
def test_what_is_written_is_allowed_and_read(name: str, kind: str) -> None:
    dialect, tokens = model(name, kind)
    spec = answer_grammar(dialect, TOOLS)
    assert spec is not None
    for answer in ANSWERS:
        if not parsable(name, answer):
            continue
        text = WRITERS[name](answer)
        ids = encoded(tokens, text)
        parts, parser = parsed(dialect, tokens, ids)
        assert read(parts).without_ids == answer, plain(text)
        assert parser.has_calls == bool(answer.calls)
        for cuts in ((), range(len(ids))):
            free = parsed(dialect, tokens, ids, cuts, is_held=False)[0]
            assert read(free).without_ids == answer, plain(text)
        assert Follower(spec, tokens).accepts(ids), plain(text)


@ALL
@examples(8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_chunking_is_the_whole(name: str, kind: str, data: st.DataObject) -> None:
    dialect, tokens = model(name, kind)
    answer = data.draw(st.sampled_from([a for a in ANSWERS if parsable(name, a)]))
    ids = encoded(tokens, WRITERS[name](answer))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=8))
    parts, _ = parsed(dialect, tokens, ids, cuts)
    assert read(parts).without_ids == answer
    parts, _ = parsed(dialect, tokens, ids, range(len(ids)))
    assert read(parts).without_ids == answer


@ALL
def test_a_cut_answer_keeps_what_came(name: str, kind: str) -> None:
    """Whatever token is the last: names are whole, arguments are prefixes, nothing is doubled."""
    dialect, tokens = model(name, kind)
    answer = Answer(calls=(WEATHER, ("files.write", {"path": "p", "text": NASTY[1]})))
    ids = encoded(tokens, WRITERS[name](answer))
    whole, _ = parsed(dialect, tokens, ids)
    arguments = ["", ""]
    for part in whole:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    for length in range(len(ids)):
        seen = ["", ""]
        for part in parsed(dialect, tokens, ids[:length])[0]:
            match part:
                case CallStart():
                    assert part.name == answer.calls[part.index][0]
                case CallArguments():
                    seen[part.index] += part.text
                case Text():  # what may have begun a call, and what stands between two
                    is_start = dialect.opening.startswith(part.text.strip().rstrip("\ufffd"))
                    assert is_start or dialect.is_bare, part
                case _:
                    raise AssertionError(part)
        known = [text.rstrip("\ufffd") for text in seen]  # part of a character
        assert all(map(str.startswith, arguments, known)), (seen, length)


@pytest.mark.parametrize("name", [name for name in NAMES if not DIALECTS[name].is_bare])
def test_text_after_calls_is_kept(name: str) -> None:
    """And white space beside calls is dropped."""
    dialect, tokens = model(name)
    text = WRITERS[name](Answer("Before.", calls=(("now", {}),)))
    spec = answer_grammar(dialect, TOOLS)
    assert spec is not None
    for after, expected in (("\n\nAfter, <x>.", "Before.\n\nAfter, <x>."), ("", "Before.")):
        ids = encoded(tokens, text.replace("Before.", "Before.\n") + after)
        for cuts in ((), range(len(ids))):
            found = read(parsed(dialect, tokens, ids, cuts)[0])
            assert found.without_ids == Answer(expected, calls=(("now", {}),))
        assert Follower(spec, tokens).accepts(ids)


@pytest.mark.parametrize(("name", "kind"), [each for each in KINDS if each[1] != "added"])
@pytest.mark.parametrize("choice", ["auto", "required", NamedTool("get_weather")], ids=str)
def test_random_models_write_calls_that_validate(name: str, kind: str, choice: ToolChoice) -> None:
    dialect, tokens = model(name, kind)
    schemas = {tool.name: dict(tool.schema) for tool in TOOLS}
    phrases = [dialect.opening, *([dialect.parameter.close] if dialect.parameter else [])]
    num_ended = 0
    for parallel in (True, False):
        spec = answer_grammar(dialect, TOOLS, choice, parallel=parallel)
        assert spec is not None
        for seed in range(2):
            ids = walk(spec, tokens, seed, phrases=phrases)
            if ids is None:
                continue
            num_ended += 1
            found = read(parsed(dialect, tokens, ids)[0])
            for tool, arguments in found.calls:
                jsonschema.validate(arguments, schemas[tool])
            assert found.calls or choice == "auto"
            assert len(found.calls) <= 1 or (parallel and not isinstance(choice, NamedTool))
            assert choice in ("auto", "required") or found.calls[0][0] == "get_weather"
    assert num_ended >= 1


def tagged(arguments: str) -> str:
    return f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'


OSLO = '{"city": "Oslo"}'
IN_STRING = json.dumps(OSLO)
CALLED = Answer(calls=(("get_weather", {"city": "Oslo"}),))
NOTHING = Answer(calls=(("now", {}),))
LOOSE: dict[str, tuple[str, str, Answer]] = {
    "string": ("hermes", tagged(IN_STRING), CALLED),
    "string, later": ("kimi_k2", WRITERS["kimi_k2"](CALLED).replace(OSLO, IN_STRING), CALLED),
    "string, bare": (
        "llama3_json",
        WRITERS["llama3_json"](CALLED).replace(OSLO, IN_STRING),
        CALLED,
    ),
    "arguments first": (
        "hermes",
        f'<tool_call>{{"arguments": {OSLO}, "name": "get_weather"}}</tool_call> Done.',
        Answer(" Done.", calls=CALLED.calls),
    ),
    "parameters": (
        "granite",
        f'<|tool_call|>[{{"name":"get_weather","parameters":{OSLO}}}]',
        CALLED,
    ),
    "OpenAI's object": (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": '
        f"{OSLO}}}}}",
        CALLED,
    ),
    "other members": (
        "llama3_json",
        f'{{"type": "function", "name": "get_weather", "parameters": {OSLO}}}',
        CALLED,
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "now"}</tool_call>', NOTHING),
    "null": ("deepseek_v31", WRITERS["deepseek_v31"](NOTHING).replace("{}", "null"), NOTHING),
    "function, tags": (
        "qwen3_coder",
        "I look.\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
        "</tool_call>",
        Answer("I look.", calls=CALLED.calls),
    ),
    "function, one line": (
        "hermes",
        "<function=get_weather><parameter=city>Oslo</parameter></function>",
        CALLED,
    ),
    "function, JSON": ("llama3_json", f"<function=get_weather>{OSLO}</function>", CALLED),
    "function, nothing": ("mistral", "<function=now></function>", NOTHING),
    "tags on one line": (
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
        CALLED,
    ),
}
MALFORMED: dict[str, tuple[str, str]] = {
    "no value": ("hermes", tagged('{"city": }')),
    "no object in the string": ("hermes", tagged('"Oslo"')),
    "a list": ("hermes", tagged('["Oslo"]')),
    "NaN": ("hermes", tagged('{"days": NaN}')),
    "missing": ("hermes", '<tool_call>{"name": "get_weather"}</tool_call>'),
    "unknown": ("hermes", '<tool_call>{"name": "sing", "arguments": {}}</tool_call>'),
    "never closed": ("hermes", tagged('{"city": "Oslo')[:-14]),
    "cut": ("kimi_k2", WRITERS["kimi_k2"](CALLED).partition("Oslo")[0]),
    "bare": ("llama3_json", '{"name": "get_weather", "parameters": {"city": Oslo}}'),
    "JSON that is no call": ("llama3_json", '{"city": "Oslo"}'),
    "keywords": ("pythonic", "[get_weather(city=)]"),
    "no keyword": ("pythonic", '[get_weather("Oslo")]'),
    "tags": ("qwen3_coder", "<tool_call>\n<function=get_weather>\nOslo\n</function>\n</tool_call>"),
    "open tag": (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</tool_call>",
    ),
    "words in a function": ("hermes", "Use <function=get_weather>Oslo</function> for it."),
    "second of two": ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"a": }}] and so on'),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["added", "text"])
def test_free_calls_are_read_as_they_were_meant(kind: str) -> None:
    """Catches arguments that are lost where no grammar holds the model to its format."""
    for label, (name, text, answer) in LOOSE.items():
        dialect, tokens = model(name, kind)
        ids = encoded(tokens, text)
        for cuts in ((), range(len(ids))):
            parts, _ = parsed(dialect, tokens, ids, cuts, is_held=False)
            assert read(parts).without_ids == answer, (label, cuts)


@pytest.mark.parametrize("kind", ["added", "text"])
def test_malformed_calls_are_text(kind: str) -> None:
    """Catches a call with arguments that nobody wrote, and text that is lost with it."""
    for label, (name, text) in MALFORMED.items():
        dialect, tokens = model(name, kind)
        ids = encoded(tokens, text)
        for cuts in ((), range(len(ids))):
            parts, parser = parsed(dialect, tokens, ids, cuts, is_held=False)
            assert read(parts) == Answer(plain(text)), (label, cuts)
            assert not parser.has_calls


def test_whole_calls_before_a_malformed_one_count() -> None:
    dialect, tokens = model("mistral", "added")
    rest = ', {"name": "now", "arguments": {"a": }}] and so on'
    ids = encoded(tokens, '[TOOL_CALLS][{"name": "now", "arguments": {}}' + rest)
    for cuts in ((), range(len(ids))):
        found = read(parsed(dialect, tokens, ids, cuts, is_held=False)[0])
        assert found.without_ids == Answer(rest, calls=NOTHING.calls)
