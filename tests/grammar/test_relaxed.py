"""Lenient schemas: keywords that no grammar can enforce are dropped, and all others are held."""

from __future__ import annotations

import copy
import json
import re
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from quire.base.errors import RequestError
from quire.plan.grammar.source import grammar_text, without_refused
from quire.plan.grammar.trial import _judge
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.json_schema import (
    all_unsupported,
    find_unsupported,
    subschemas,
    without_unsupported,
)
from tests.dialect.models import library, tokenizer

MALFORMED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"type": "object", "properties": {"a": {keyword: value}}}, f"$.properties.a.{keyword}")
        for keyword, value in (
            ("format", ["date"]), ("format", 5), ("pattern", 5), ("pattern", ["x"]),
            ("properties", 5), ("properties", ["ab"]), ("allOf", 5), ("allOf", {"a": 1}),
            ("minimum", "5"), ("exclusiveMaximum", [5]), ("multipleOf", True), ("minItems", True),
            ("prefixItems", 5), ("prefixItems", [5]), ("items", [5]), ("additionalItems", 5),
            ("$id", 5), ("$anchor", ["x"]),
        )
    ),
    *(
        ({"properties": {"a": {}}, "minProperties": 0, "required": names}, "$.required")
        for names in ([{}], [[]], [None])
    ),
    ({"type": "array", "items": {"enum": []}}, "$.items.enum"),
    ({"anyOf": []}, "$.anyOf"),
    ({"type": "array", "minItems": 1.5}, "$.minItems"),
    ({"type": "string", "maxLength": -1}, "$.maxLength"),
    ({"type": "string", "maxLength": 10**30}, "$.maxLength"),
    ({"anyOf": [5, {"type": "string"}]}, "$.anyOf"),
    ({"type": "array", "items": 7}, "$.items"),
    ({"type": "object", "required": [1]}, "$.required"),
    ({"type": "integer", "minimum": "3"}, "$.minimum"),
    ({"type": "object", "required": True}, "$.required"),
    ({"type": "object", "properties": []}, "$.properties"),
    ({"type": "object", "properties": {"a": None}}, "$.properties.a"),
    ({"anyOf": [{"$ref": "#/$defs/none"}]}, "$.anyOf[0].$ref"),
]  # fmt: skip
DROPPED: list[tuple[dict[str, Any], str]] = [
    *MALFORMED,
    ({"type": "string", "pattern": "^(?=x)"}, "$.pattern"),
    ({"type": "string", "pattern": "(a)\\1"}, "$.pattern"),
    ({"$ref": "https://example.com/s"}, "$.$ref"),
    ({"type": "string", "pattern": "\\bfoo\\b"}, "$.pattern"),
    ({"type": "string", "pattern": "(?<a>x)\\k<a>"}, "$.pattern"),
    ({"type": "string", "pattern": "x\\Z"}, "$.pattern"),
    *(
        ({"type": "string", "pattern": pattern}, "$.pattern")
        for pattern in ("a^", "(", "[z-a]", "[a--b]", "x{5,2}", "(a(?#c)b)", "[]", "a++", "[a")
    ),
    ({"type": "integer", "minimum": 2**64}, "$.minimum"),
    ({"properties": {"a": {"minimum": 1e300}, "b": {"minimum": 1}}}, "$.properties.a.minimum"),
    ({"properties": {"a": {"const": 2**64}}}, "$.properties.a.const"),
    ({"enum": [1, 2**64, 3]}, "$.enum"),
    ({"items": {"oneOf": [{"type": "number"}, {"minimum": 2}]}}, "$.items.oneOf"),
    ({"properties": {"a": {}}, "minProperties": 1}, "$.minProperties"),
    ({"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, "$.maxProperties"),
    *(
        ({"items": {"multipleOf": factor}}, "$.items.multipleOf")
        for factor in (999983, 10**400, 10**18, 1e300, float("inf"))
    ),
    ({"patternProperties": {"^a": {}, "^\\p{L}": {}}}, "$.patternProperties"),
    ({"patternProperties": {"\\Bx": {}, "\\Zx": {}}}, "$.patternProperties"),
    ({"$ref": "other.json#/x"}, "$.$ref"),
    ({"items": {"$id": "a", "$ref": "#/$defs/n"}, "$defs": {"n": {}}}, "$.items.$ref"),
    ({"$ref": "n#/$defs/o", "$defs": {"n": {"$id": "n"}, "o": {}}}, "$.$ref"),
    ({"$ref": "n", "$defs": {"n": {"$id": "https://a/n"}}}, "$.$ref"),
    ({"$id": "https://a/b", "$ref": "n", "$defs": {"n": {"$id": "https://a/c/n"}}}, "$.$ref"),
    ({"$ref": "https://[/n"}, "$.$ref"),
]  # fmt: skip


TYPES: list[tuple[dict[str, Any], str]] = [
    ({"type": "dict"}, "$.type"),
    ({"type": "String"}, "$.type"),
    ({"type": ["string", "nul"]}, "$.type"),
    ({"type": ["string", ["null"]]}, "$.type"),
    ({"type": []}, "$.type"),
    ({"type": 5}, "$.type"),
    ({"type": "object", "properties": {"a": {"type": "int"}}}, "$.properties.a.type"),
    ({"type": "object", "properties": {"type": {"type": "int"}}}, "$.properties.type.type"),
    ({"type": "object", "properties": {"enum": {"type": "int"}}}, "$.properties.enum.type"),
    *(
        ({keyword: {"n": {"type": "int"}}, "items": {"$ref": f"#/{keyword}/n"}},
         f"$.{keyword}.n.type")
        for keyword in ("$defs", "definitions", "patternProperties", "dependentSchemas")
    ),
    *(
        ({keyword: [{"type": "null"}, {"type": "int"}]}, f"$.{keyword}[1].type")
        for keyword in ("anyOf", "oneOf", "allOf", "items", "prefixItems")
    ),
    *(
        ({keyword: {"items": {"type": "int"}}}, f"$.{keyword}.items.type")
        for keyword in (
            "items", "additionalItems", "additionalProperties", "not", "if", "then", "else",
            "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
        )
    ),
    (
        {"items": {"$ref": "#/components/a~1b"}, "components": {"a/b": {"not": {"type": "int"}}}},
        "$.components.a/b.not.type",
    ),
    ({"items": {"$ref": "#/default/0"}, "default": [{"type": "int"}]}, "$.default.0.type"),
]  # fmt: skip
NAMED_TYPES = "string, number, integer, boolean, null, array, object"


def compiles(schema: Any, *, is_strict: bool) -> bool:
    spec = GrammarSpec(GrammarKind.JSON, json.dumps(schema), is_strict)
    try:
        text = grammar_text(spec)
    except RequestError:
        return False
    return not LLMatcher.validate_grammar(text)


@pytest.mark.parametrize(("schema", "path"), DROPPED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_held_is_dropped(schema: dict[str, Any], path: str) -> None:
    assert {place.split(" (")[0] for place in all_unsupported(schema)} == {path}
    held = copy.deepcopy(schema)
    without_unsupported(held)
    assert all_unsupported(held) == []
    assert compiles(schema, is_strict=False)


@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize(("schema", "path"), TYPES, ids=lambda value: str(value)[:50])
def test_a_type_that_there_is_not_is_refused(
    schema: dict[str, Any], path: str, is_strict: bool
) -> None:
    """Turns red when a misspelt type allows any value, in a lenient schema too."""
    spec = GrammarSpec(GrammarKind.JSON, json.dumps(schema), is_strict)
    tag = {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    tagged = GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), is_strict)
    for each in (spec, tagged):
        with pytest.raises(RequestError) as refusal:
            grammar_text(each)
        assert f"the JSON Schema has {path} (" in str(refusal.value)
        assert NAMED_TYPES in str(refusal.value)
        assert "strict" not in str(refusal.value)


@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
        {"type": "object", "properties": {"properties": {"properties": {"type": {}}}}},
        {"enum": [{"type": "int"}]},
        {"const": {"type": ["int"]}},
        {"default": {"type": "int"}, "examples": [{"type": "int"}], "x-note": {"type": "int"}},
        {"type": ["string", "number", "integer", "boolean", "null", "array", "object"]},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": {"$ref": "#/definitions/n", "type": "int"},
            "definitions": {"n": {"type": "integer"}},
        },
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_no_type_may_have_any_text(schema: dict[str, Any], is_strict: bool) -> None:
    """Turns red when values, names of properties or notes are taken for types."""
    assert compiles(schema, is_strict=is_strict)


@pytest.mark.parametrize(("schema", "path"), MALFORMED, ids=lambda value: str(value)[:50])
def test_a_strict_schema_is_refused_for_a_value_of_the_wrong_kind(
    schema: dict[str, Any], path: str
) -> None:
    """Turns red when a bound is lost without a word, or the words are those of a fault in here."""
    with pytest.raises(RequestError, match=re.escape(f"the JSON Schema has {path} (")):
        grammar_text(GrammarSpec(GrammarKind.JSON, json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 1.0},
        {"type": "object", "properties": {"type": {"type": "string"}, "enum": {"enum": ["a"]}}},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 5.5, "multipleOf": 2},
        {"type": "number", "multipleOf": 1e8},
        {"type": "string", "pattern": r"^C:\\bin\\(\d\w\S\x41\u00e9|\p{L}|\u{1F600}|[^x])\/\-$"},
        *(
            {"pattern": text}
            for text in (r"^\[[^]]+\]$", r"^\w+\[]$", "[^]", r"\Aab\z", r"\a", r"\cA")
        ),
        {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
        {"patternProperties": {"^a": {"type": "null"}, "b$": {}}, "additionalProperties": False},
        {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/n"}], "$defs": {"n": {"type": "integer"}}},
        {"$defs": {"n": {"$id": "node", "type": "object"}}, "$ref": "node"},
        {"$id": "https://a/b", "$ref": "https://a/b#/$defs/n", "$defs": {"n": {"type": "null"}}},
        {"$id": "https://a/b", "$ref": "./b#/$defs/n", "$defs": {"n": {"type": "null"}}},
        {"$id": "https://a/b", "$ref": "/b#/$defs/n", "$defs": {"n": {"type": "null"}}},
        {"$id": "https://a/b", "$ref": "/c", "$defs": {"n": {"$id": "https://a/c"}}},
        {"$id": "https://a/b", "$ref": "https://a/d/c", "$defs": {"n": {"$id": "d/c"}}},
        {
            "$ref": "/n",
            "$defs": {"n": {"$id": "n", "items": {"$ref": "o"}, "$defs": {"o": {"$id": "o"}}}},
        },
        {"$id": f"https://a/{'b' * 2_000}", "$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}},
        {"$ref": "n", "$defs": {"n": {"$id": "n", "$ref": "#/$defs/o", "$defs": {"o": {}}}}},
        {"$ref": "n#/$defs/o", "$defs": {"n": {"$id": "n", "$defs": {"o": {}}}}},
        {"$id": "urn:a:b", "$ref": "urn:a:c", "$defs": {"n": {"$id": "urn:a:c"}}},
    ],
    ids=str,
)
def test_what_can_be_held_stays(schema: dict[str, Any]) -> None:
    held = copy.deepcopy(schema)
    without_unsupported(held)
    assert held == schema
    assert compiles(schema, is_strict=False)
    assert find_unsupported(schema) is None


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"properties": {
            "a": {"type": "string", "pattern": "\\p{Nope}"}, "b": {"pattern": "^[0-9]$"},
            "c": {"patternProperties": {"\\p{Nope}": {}}, "additionalProperties": False},
        }},
        ["$.properties.a.pattern", "$.properties.c.patternProperties",
         "$.properties.c.additionalProperties"],
    ),
    (
        {"type": "object", "required": ["a"],
         "properties": {"a": {"minLength": 5, "maxLength": 3, "type": "string"}}},
        ["$.properties.a.minLength"],
    ),
    ({"items": {"multipleOf": 1e-20}}, ["$.items.multipleOf"]),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, ["$.allOf"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "paths"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_the_library_refuses_is_dropped(schema: dict[str, Any], paths: list[str]) -> None:
    """Turns red when one keyword of one property refuses a request, or takes others with it."""
    spec = GrammarSpec(GrammarKind.JSON, json.dumps(schema), is_strict=False)
    verdict = _judge(library(tokenizer()), -(-tokenizer().vocab_size // 32), spec)
    assert not verdict.refusal
    ((*dropped,),) = verdict.dropped.values()
    assert [path.split(" (")[0] for path in dropped] == paths
    strict = GrammarSpec(GrammarKind.JSON, json.dumps(schema))
    verdict = _judge(library(tokenizer()), -(-tokenizer().vocab_size // 32), strict)
    assert f"cannot be used for {paths[0]} (" in verdict.refusal


@pytest.mark.parametrize("name", ["^x\\b", "^x\\Z", "^x{2,1}", "\\p{Nope}"])
@pytest.mark.parametrize("others", [False, {"type": "string"}], ids=str)
def test_a_dropped_name_leaves_its_properties_free(name: str, others: Any) -> None:
    """Turns red when a property that the client's schema allows is refused."""
    schema = {"patternProperties": {name: {"type": "integer"}}, "additionalProperties": others}
    spec = GrammarSpec(GrammarKind.JSON, json.dumps(schema), is_strict=False)
    text = grammar_text(spec, drops_refused=True)
    matcher = LLMatcher(library(tokenizer()), text, log_level=0)
    ids = tokenizer().encode('{"x": 1}', add_special_tokens=False)
    assert matcher.validate_tokens(ids) == len(ids)
    paths = without_unsupported(schema) + without_refused(schema)
    assert [path.split(" (")[0] for path in paths] == [
        "$.patternProperties", "$.additionalProperties",
    ]  # fmt: skip


def test_references_are_looked_up_among_all_names_at_once() -> None:
    """Turns red when each reference is compared with each name, which blocks a server."""
    properties = {f"p{i}": {"$id": f"i{i}", "$ref": f"x{i}"} for i in range(4_000)}
    started = time.process_time()
    assert len(all_unsupported({"properties": properties})) == 4_000
    assert time.process_time() - started < 1


WIDE = {f"p{i}": {"type": "string"} for i in range(20)}
BASE: dict[str, Any] = {"type": "object", "properties": WIDE, "required": ["kind", *WIDE]}
LISTED = {f"p{i}": {"enum": list(range(700))} for i in range(20)}
UNIONS: list[tuple[list[dict[str, Any]], bool]] = [
    ([{"const": i} for i in range(100)], True),
    ([{"enum": [i, f"{i}", None if i in (40, 70) else [i]]} for i in range(100)], False),
    (
        [
            {"allOf": [{"$ref": "#/$defs/base"}], "properties": {"kind": {"const": f"k{i}"}}}
            for i in range(60)
        ],
        True,
    ),
    ([{"$ref": "#/$defs/base"}] * 60, False),
    ([{"type": "object", "properties": LISTED, "required": [f"p{i}"]} for i in range(30)], False),
    ([{"minimum": 9 * i, "maximum": 9 * i + 8, "type": "integer"} for i in range(100)], True),
    ([{"minimum": 9 * i, "maximum": 9 * i + 9, "type": "integer"} for i in range(100)], False),
    ([{"anyOf": [{"const": f"{i}{j}"} for j in range(10)]} for i in range(40)], False),
]  # fmt: skip


@pytest.mark.parametrize(("options", "is_held"), UNIONS, ids=lambda value: str(value)[:40])
def test_unions_are_compared_in_time(options: list[dict[str, Any]], is_held: bool) -> None:
    """Turns red when a union of a few kilobytes takes a server seconds. One that would is taken for
    one whose options overlap."""
    schema = {"oneOf": options, "$defs": {"base": BASE}}
    started = time.process_time()
    found = all_unsupported(schema)
    assert time.process_time() - started < 0.5
    assert [path.split(" (")[0] for path in found] == ([] if is_held else ["$.oneOf"])
    assert (find_unsupported(schema) is None) == is_held


def names_of(*patterns: str) -> dict[str, Any]:
    return {"patternProperties": {key: {} for key in patterns}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "num_held"),
    [
        (names_of(*(f"[a-z]{i}.*[b-y]{i + 1}(x|y){{{i}}}" for i in range(1, 20))), 1),
        (names_of(*(f"(a|b)*a(a|b){{9}}{i}" for i in range(8))), 0),
        (names_of("^.{1,255}$", "^x-"), 1),
        (names_of("a" * 2_800, "b" * 2_800), 0),
        (names_of("^.{1,64}$", "^x-"), 2),
        (
            {
                "properties": {
                    f"p{j}": names_of(*(f"(a|b)*a(a|b){{{i}}}{j}" for i in (6, 7, 8)))
                    for j in range(25)
                }
            },
            0,
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_names_are_told_apart_in_time(schema: dict[str, Any], num_held: int) -> None:
    """Turns red when patterns of a few hundred characters take a server seconds."""
    started = time.process_time()
    without_unsupported(schema)
    assert time.process_time() - started < 0.7
    left = [len(node.get("patternProperties", ())) for _, node in subschemas("$", schema)]
    assert sum(left) == num_held
    assert find_unsupported(schema) is None
