"""Lenient schemas: what no grammar can hold is dropped, and all else is held."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from llguidance import LLMatcher

from quire.errors import RequestError
from quire.grammar.source import grammar_text
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.json_schema import all_unsupported, without_unsupported

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
    assert [place.split(" (")[0] for place in all_unsupported(schema)] == [path]
    held = copy.deepcopy(schema)
    without_unsupported(held)
    assert all_unsupported(held) == []
    assert compiles(schema, is_strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 1.0},
        {"type": "object", "properties": {"type": {"type": "string"}, "enum": {"enum": ["a"]}}},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 5.5, "multipleOf": 2},
    ],
    ids=str,
)
def test_what_can_be_held_stays(schema: dict[str, Any]) -> None:
    held = copy.deepcopy(schema)
    without_unsupported(held)
    assert held == schema
    assert compiles(schema, is_strict=False)
