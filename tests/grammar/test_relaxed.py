"""Lenient schemas: what no grammar can hold is dropped, and all else is held."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from quire.errors import RequestError
from quire.grammar.source import grammar_text
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.json_schema import all_unsupported, relaxed

DROPPED: list[tuple[dict[str, Any], str]] = [
    ({"type": "dict"}, "$.type"),
    ({"type": "object", "properties": {"a": {"type": "float"}}}, "$.properties.a.type"),
    ({"type": ["string", "any"]}, "$.type"),
    ({"type": "string", "pattern": "^(?=x)"}, "$.pattern"),
    ({"type": "string", "pattern": "(a)\\1"}, "$.pattern"),
    ({"$ref": "https://example.com/s"}, "$.$ref"),
    ({"type": "array", "items": {"enum": []}}, "$.items.enum"),
    ({"anyOf": []}, "$.anyOf"),
    ({"type": "array", "minItems": 1.5}, "$.minItems"),
    ({"type": "string", "maxLength": -1}, "$.maxLength"),
    ({"type": "integer", "minimum": "3"}, "$.minimum"),
    ({"type": "object", "required": True}, "$.required"),
    ({"type": "object", "properties": []}, "$.properties"),
]  # fmt: skip


def compiles(schema: Any, *, is_strict: bool) -> bool:
    spec = GrammarSpec(GrammarKind.JSON, json.dumps(schema), is_strict)
    try:
        text = grammar_text(spec)
    except RequestError:
        return False
    return not LLMatcher.validate_grammar(text)


@pytest.mark.parametrize(("schema", "path"), DROPPED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_held_is_dropped(schema: dict[str, Any], path: str) -> None:
    before = json.dumps(schema)
    held, dropped = relaxed(schema)
    assert dropped == [path]
    assert json.dumps(schema) == before
    assert relaxed(held) == (held, [])
    assert compiles(schema, is_strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"not": {}}, "b": {"format": "path"}}},
        {"type": "array", "uniqueItems": True, "minItems": 1.0},
        {"type": "object", "properties": {"type": {"type": "string"}, "enum": {"enum": ["a"]}}},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 5.5, "multipleOf": 2},
    ],
    ids=str,
)
def test_what_can_be_held_stays(schema: dict[str, Any]) -> None:
    held, dropped = relaxed(schema)
    assert dropped == []
    assert held == schema
    assert compiles(schema, is_strict=False)


@pytest.mark.parametrize(("schema", "path"), DROPPED, ids=lambda value: str(value)[:50])
def test_what_is_dropped_is_listed(schema: dict[str, Any], path: str) -> None:
    (place,) = all_unsupported(schema)
    assert place.partition(" (")[0] == path


def test_a_type_that_there_is_none_of_is_refused_where_nothing_may_be_dropped() -> None:
    assert not compiles({"type": "dict"}, is_strict=True)
