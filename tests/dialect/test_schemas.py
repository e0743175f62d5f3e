"""Schemas of arguments in every style: output under enforced keywords is valid, and the other
keywords are refused by their paths, or dropped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from quire.base.errors import RequestError
from quire.plan.grammar.source import grammar_text
from quire.plan.grammar.trial import LIMITS, _judge
from quire.server.generation.parsed import AnswerForm
from quire.server.openai.structured import dropped_keywords
from quire.text.dialect import Dialect, Tool, answer_grammar
from quire.text.dialect.families import DIALECTS
from quire.text.dialect.rules import Rules, json_grammar
from quire.text.dialect.spec import Markers
from quire.text.rendering import Tokenizer
from tests.dialect.answers import parsed, read
from tests.dialect.models import Follower, library, tokenizer, walk
from tests.dialect.written import encoded

STYLES = ("hermes", "qwen3_coder", "glm45", "deepseek_v32", "pythonic")
NODE = {
    "type": "object",
    "properties": {"value": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["value"],
    "additionalProperties": False,
}
HELD: dict[str, dict[str, Any]] = {
    "digits": {"type": "string", "pattern": "^[0-9]{2,4}$"},
    "within": {"type": "string", "pattern": "[a-c]/x"},
    "either": {"type": "string", "pattern": "^(yes|no)$"},
    "flag": {"type": "string", "pattern": "^(?:(?i:x)|y)$"},
    "class": {"type": "string", "pattern": "^[(^]{2}$"},
    "length": {"type": "string", "minLength": 2, "maxLength": 3},
    "names": {"enum": ["a b", 'q"\\', "é\n", ""]},
    "mixed": {"enum": ["one", 1, None, True]},
    "const": {"const": "x>y</parameter>"},
    "nullable": {"type": ["string", "null"], "maxLength": 5},
    "optional": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    "number or text": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    "list or text": {"type": ["array", "string"], "items": {"type": "integer"}, "maxItems": 2},
    "bounded or text": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "string"}]},
    "integer": {"type": "integer", "minimum": -3, "maximum": 12},
    "number": {"type": "number", "minimum": 0.5},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "empty": {"type": "array", "maxItems": 0},
    "object": {
        "type": "object",
        "properties": {"a": {"type": ["boolean", "null"]}, "b c": {"type": "string"}},
        "required": ["b c"],
        "additionalProperties": False,
    },
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "tree": {"$ref": "#/$defs/node"},
    "any": {},
}


def model(name: str) -> tuple[Dialect, Tokenizer]:
    tokens = tokenizer(DIALECTS[name].markers)
    return replace(DIALECTS[name], thinking=None).bound(tokens), tokens


def tool(schema: Any, *, is_strict: bool, name: str = "a") -> Tool:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {name: schema, "other": {"type": "integer"}},
        "required": [name],
        "additionalProperties": False,
        "$defs": {"node": NODE},
    }
    return Tool("f", parameters, is_strict=is_strict)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", HELD)
def test_arguments_are_instances(style: str, kind: str) -> None:
    dialect, tokens = model(style)
    asked = tool(HELD[kind], is_strict=True)
    spec = answer_grammar(dialect, [asked], "required", parallel=False)
    assert spec is not None
    phrases = [dialect.parameter.close] if dialect.parameter else []
    num_ended = 0
    for seed in range(4):
        ids = walk(spec, tokens, seed, most=300, phrases=[*phrases, "12", "yes", "a/x"])
        if ids is None:
            continue
        num_ended += 1
        ((_, arguments),) = read(parsed(dialect, tokens, ids, tools=[asked])[0]).calls
        jsonschema.validate(arguments, dict(asked.schema))
    assert num_ended >= 1


CALLS: list[tuple[dict[str, Any], str, str, Any]] = [
    ({"type": "string"}, "qwen3_coder", "02134", "02134"),
    ({"type": "integer"}, "qwen3_coder", "2134", 2134),
    ({"type": "string"}, "qwen3_coder", "null", "null"),
    ({"type": ["string", "null"]}, "qwen3_coder", "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "qwen3_coder", "7", 7),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "qwen3_coder", "7a", "7a"),
    ({"type": ["string", "integer"], "maximum": 9}, "qwen3_coder", "7", 7),
    ({"type": ["string", "boolean"]}, "qwen3_coder", "true", True),
    ({"type": ["string", "boolean"]}, "qwen3_coder", "true story", "true story"),
    ({"type": ["string", "number"]}, "glm45", "1.5e3", 1500.0),
    ({"type": ["string", "object"]}, "qwen3_coder", '{"a": 1}', {"a": 1}),
    ({"type": "string", "maxLength": -1}, "qwen3_coder", "abc", "abc"),
    ({"type": "float"}, "qwen3_coder", "1.5", 1.5),
    ({"type": "string"}, "qwen3_coder", "a\n\nb\n", "a\n\nb\n"),
    ({"type": "string"}, "qwen3_coder", '"quoted"', '"quoted"'),
    ({"type": "array"}, "qwen3_coder", '["</parameter>"]', ["</parameter>"]),
    ({"type": "string"}, "glm45", "<arg_key>", "<arg_key>"),
    ({"$ref": "#/$defs/node"}, "glm45", '{"value": true}', {"value": True}),
]


@pytest.mark.parametrize(("schema", "style", "written", "value"), CALLS, ids=str)
def test_tagged_values_have_the_types_of_their_schemas(
    schema: dict[str, Any], style: str, written: str, value: Any
) -> None:
    dialect, tokens = model(style)
    asked = tool(schema, is_strict=False)
    syntax = dialect.parameter
    assert syntax is not None
    text = f"{dialect.opening}f{dialect.middle}{syntax.open}a{syntax.middle}"
    text += f"\ue000{written}\ue001{syntax.close}{dialect.close}"
    ids = encoded(tokens, text)
    spec = answer_grammar(dialect, [asked])
    assert spec is not None
    assert Follower(spec, tokens).accepts(ids)
    for cuts in ((), range(len(ids))):
        parts, _ = parsed(dialect, tokens, ids, cuts, tools=[asked])
        assert read(parts).calls == (("f", {"a": value}),)


BESIDE = [
    {"type": "string", "maxLength": 1500},
    {"type": "string", "minLength": 1400},
    {"type": "string", "minLength": 300},
    {"type": "integer"},
]
REFUSED: list[tuple[str, Any, str]] = [
    ("hermes", {"not": {}}, r"tools\[0\].*\$\.properties\.a\.not"),
    ("hermes", {"type": "string", "format": "path"}, r"tools\[0\].*\$\.properties\.a\.format"),
    ("qwen3_coder", {"type": "string", "format": "date"}, r"tools\[0\].*\$\.properties\.a\.format"),
    ("qwen3_coder", {"type": "string", "pattern": "(a$|b){2}"}, r"\$\.properties\.a\.pattern"),
    ("glm45", {"anyOf": [{"type": "string", "format": "date"}]}, r"a\.anyOf\[0\]\.format"),
    ("glm45", {"type": "array", "uniqueItems": True}, r"tools\[0\].*uniqueItems"),
    ("pythonic", {"allOf": [{"type": "boolean"}]}, r"\$\.properties\.a\.allOf"),
    ("pythonic", {"type": "string", "pattern": "(?=a)"}, r"tools\[0\].*\.pattern"),
    ("pythonic", {"$ref": "#/$defs/nothing"}, r"a\.\$ref"),
    ("qwen3_coder", {"type": "string", "maxLength": 1501}, r"a\.maxLength.*1,500"),
    ("deepseek_v32", {"type": "string", "minLength": 5000}, r"a\.minLength.*1,500"),
    ("glm45", {"type": "string", "minLength": 5000}, r"a\.minLength.*1,500"),
    ("glm45", {"type": "string", "minLength": 3, "maxLength": 2}, r"a\.maxLength.*minLength"),
    ("qwen3_coder", {"type": "string", "maxLength": "5"}, r"a\.maxLength"),
    ("qwen3_coder", {"anyOf": BESIDE}, r"a\.anyOf\[1\]\.minLength.*beside.*1,500"),
    ("qwen3_coder", {"type": "string", "pattern": "a{2,1}"}, r"a\.pattern"),
    ("deepseek_v32", {"type": "string", "pattern": "^\\p{Foo}$"}, r"a\.pattern"),
    ("qwen3_coder", {"type": "string", "pattern": "^a)|(b$"}, r"a\.pattern"),
    ("glm45", {"type": "string", "pattern": "^(?x)a # b$"}, r"a\.pattern"),
    ("glm45", {"type": "string", "pattern": "a\\"}, r"a\.pattern"),
    *(
        (style, {"type": "strin"}, r"tools\[0\].*\$\.properties\.a\.type")
        for style in ("hermes", "qwen3_coder", "glm45", "deepseek_v32", "pythonic")
    ),
    ("glm45", {"items": {"type": ["int"]}}, r"\$\.properties\.a\.items\.type"),
    ("pythonic", {"anyOf": [{"type": "int"}]}, r"a\.anyOf\[0\]\.type"),
    ("qwen3_coder", {"type": "string", "pattern": 5}, r"a\.pattern"),
    ("pythonic", {"type": "string", "enum": []}, r"a\.enum"),
]


@pytest.mark.parametrize(("style", "schema", "place"), REFUSED, ids=str)
def test_what_cannot_be_held(style: str, schema: Any, place: str) -> None:
    """A strict tool is refused, by the path; another one goes on without it, and it is listed."""
    dialect, tokens = model(style)
    with pytest.raises(RequestError, match=place):
        spec = answer_grammar(dialect, [tool(schema, is_strict=True)], "required")
        assert spec is not None
        grammar_text(spec, drops_refused=True)
    lenient = tool(schema, is_strict=False)
    spec = answer_grammar(dialect, [lenient], "required")
    assert spec is not None
    assert Follower(spec, tokens).allowed()
    dropped = dropped_keywords(None, AnswerForm(dialect, tokens, (lenient,)))
    path = place.removeprefix(r"tools\[0\].*").split(".*")[0]
    is_listed = any(re.search(path, each) for each in dropped)
    assert is_listed or "Foo" in str(schema), "the library alone knows all properties"


@pytest.mark.parametrize(
    ("style", "schema", "paths"),
    [
        (
            "qwen3_coder",
            {"properties": {"a\nb": {}, "c": {"type": "integer"}}},
            ["$.properties.a\nb"],
        ),
        ("glm45", {"properties": {"c": {}}, "anyOf": [{"required": ["c"]}]}, ["$.anyOf"]),
        ("pythonic", {"properties": {"a b": {"type": "null"}, "c": {}}}, ["$.properties.a b"]),
        ("hermes", {"properties": {"a b": {"type": "null"}}}, []),
    ],
    ids=str,
)
def test_what_a_format_cannot_write_is_listed(style: str, schema: Any, paths: list[str]) -> None:
    """Turns red when a name that a format leaves out is missing in a request's timeline."""
    dialect, tokens = model(style)
    lenient = Tool("f", {"type": "object", **schema})
    dropped = dropped_keywords(None, AnswerForm(dialect, tokens, (lenient,)))
    assert [path.split(" (")[0] for path in dropped] == [f"f: {path}" for path in paths]


@pytest.mark.parametrize("style", STYLES)
def test_lengths_are_counted_as_far_as_the_library_can(style: str) -> None:
    """Turns red when one long text of one tool refuses all tools."""
    dialect, tokens = model(style)
    end = dialect.tokens.split(dialect.parameter.close)[0] if dialect.parameter else 0
    schema = {"type": ["string", "null"], "minLength": 1}
    for most in (1_500, 100_000):
        asked = tool({**schema, "maxLength": most}, is_strict=False)
        spec = answer_grammar(dialect, [asked], "required")
        assert spec is not None
        text = grammar_text(spec)
        assert not LLMatcher(library(tokens), text, log_level=0, limits=LIMITS).get_error()
        if isinstance(end, str):
            assert (f",{most + len(end)}}}" in text) == (most == 1_500)


def test_lengths_of_several_texts_are_counted_together() -> None:
    """Turns red when a length is left out that the library can count."""
    dialect, tokens = model("qwen3_coder")
    spec = answer_grammar(dialect, [tool({"anyOf": BESIDE}, is_strict=False)], "required")
    assert spec is not None
    text = grammar_text(spec)
    assert not LLMatcher(library(tokens), text, log_level=0, limits=LIMITS).get_error()
    end = len(dialect.parameter.close) if dialect.parameter else 0
    assert [f"{{{least + end}," in text for least in (1400, 300)] == [False, True]
    alone = [{"type": "string", "minLength": 1400, "maxLength": 1500}, {"type": "integer"}]
    spec = answer_grammar(dialect, [tool({"anyOf": alone}, is_strict=True)], "required")
    assert spec is not None
    assert f"{{{1400 + end},{1500 + end}}}" in grammar_text(spec)
    words = {"enum": ["a"], "maxLength": 9_000}
    assert answer_grammar(dialect, [tool(words, is_strict=True)], "required") is not None


NAMES = ("content-type", "$filter", "@type", "a.b", "x:y", "a/b")
OTHERS = ("größe", "a b", 'a"b', "", "a>b", "x=y", "f(")


@pytest.mark.parametrize("style", STYLES)
def test_a_pattern_that_the_library_refuses_is_dropped_alone(style: str) -> None:
    """Turns red when one such pattern, as many tools have, refuses all tools."""
    dialect, tokens = model(style)
    mail = {"type": "string", "pattern": r"^[\w-\.]+@([\w-]+\.)+[\w-]{2,4}$"}
    braced = {"type": "string", "pattern": "^{[a-z]+}$"}
    asked = Tool("f", {"properties": {"a": mail, "b": braced, "c": HELD["digits"]}})
    spec = answer_grammar(dialect, [asked], "required")
    assert spec is not None
    verdict = _judge(library(tokens), -(-tokens.vocab_size // 32), spec)
    assert not verdict.refusal
    assert "{2,4}" in verdict.text and "^{" not in verdict.text


@pytest.mark.parametrize("style", STYLES)
def test_names_that_are_no_names_of_python(style: str) -> None:
    """Turns red when one such name refuses all tools, or cannot be given."""
    dialect, tokens = model(style)
    properties = {name: {"type": "string"} for name in (*NAMES, *OTHERS)}
    asked = Tool("f", {"properties": properties, "required": list(properties)})
    spec = answer_grammar(dialect, [asked], "required")
    assert spec is not None
    assert Follower(spec, tokens).allowed()
    if style == "pythonic":
        written = ", ".join(f'{name}="x"' for name in NAMES)
        ids = encoded(tokens, f"[f({written})]")
        assert Follower(spec, tokens).accepts(ids)
        parts, _ = parsed(dialect, tokens, ids, range(len(ids)), tools=[asked])
        assert read(parts).calls == (("f", dict.fromkeys(NAMES, "x")),)


def test_an_argument_that_is_required_alone() -> None:
    """Turns red when what a schema requires but does not list refuses the tool."""
    dialect, tokens = model("hermes")
    asked = Tool("f", {"properties": {"a": {"type": "null"}}, "required": ["a", "b"]})
    spec = answer_grammar(dialect, [asked], "required")
    assert spec is not None
    call = '<tool_call>\n{"name": "f", "arguments": {"a": null, "b": 1}}\n</tool_call>'
    assert Follower(spec, tokens).accepts(encoded(tokens, call))


@pytest.mark.parametrize("style", STYLES)
def test_schemas_that_list_nothing(style: str) -> None:
    """Any argument then; and where the schema lists some, no others."""
    dialect, tokens = model(style)
    free = Tool("f", {"type": "object", "additionalProperties": True})
    spec = answer_grammar(dialect, [free], "required", parallel=False)
    assert spec is not None
    found = 0
    for seed in range(3):
        ids = walk(
            spec, tokens, seed, phrases=[dialect.parameter.close] if dialect.parameter else []
        )
        if ids is not None:
            ((_, arguments),) = read(parsed(dialect, tokens, ids, tools=[free])[0]).calls
            assert isinstance(arguments, dict)
            found += 1
    assert found
    assert Tool("f", {"properties": {"a": {}}}).schema["additionalProperties"] is False
    assert Tool("f").schema["properties"] == {}


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        ([Tool("a b")], "auto", "'a b'"),
        ([Tool("")], "auto", "letters"),
        ([Tool("a"), Tool("a")], "auto", r"tools\[1\]"),
        ([], "required", "no tools"),
    ],
)
def test_tools_that_cannot_be_called(tools: list[Tool], choice: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        answer_grammar(DIALECTS["hermes"], tools, choice)


def test_a_tool_goes_without_a_type_that_there_is_not() -> None:
    """Turns red when one odd type of a lenient tool refuses a chat."""
    schema = {"type": "object", "properties": {"a": {"type": "int"}}}
    rules = Rules(Markers())
    said = rules.grammar("args_0", json_grammar(schema, is_strict=False), "tools[0]")
    text = grammar_text(rules.spec(said))
    assert not LLMatcher.validate_grammar(text)


def test_many_tools_are_one_grammar() -> None:
    dialect, tokens = model("qwen3_coder")
    properties = {f"p{i}": {"type": "string"} for i in range(8)}
    tools = [Tool(f"tool_{i}", {"properties": properties}) for i in range(128)]
    spec = answer_grammar(dialect, tools)
    assert spec is not None
    assert len(json.loads(spec.source)["grammars"]) == 0
    assert Follower(spec, tokens).allowed()
