"""Schemas that refer to themselves many times over, or say nonsense, cost little and end well."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.protocol.json_schema.types import ALL_TYPES, resolved, types_of
from quire.text.dialect import Tool, answer_grammar
from quire.text.dialect.argument_rules import _string_nodes
from quire.text.dialect.families import DIALECTS
from quire.text.dialect.harmony import render_harmony
from tests.dialect.models import tokenizer

TAGGED = DIALECTS["qwen3_coder"].bound(tokenizer(DIALECTS["qwen3_coder"].markers))


def branching(width: int) -> dict[str, Any]:
    """A definition that refers to itself `width` times."""
    options = [{"$ref": "#/$defs/a"} for _ in range(width)]
    return {
        "type": "object",
        "$defs": {"a": {"anyOf": [*options, {"type": "string"}]}},
        "properties": {"x": {"$ref": "#/$defs/a"}},
    }


def ladder(steps: int) -> dict[str, Any]:
    """Each definition refers twice to the next: 2 ** steps ways lead to the last."""
    defs: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(steps)
    }
    return {
        "$defs": {**defs, f"d{steps}": {"type": "string"}},
        "properties": {"x": {"$ref": "#/$defs/d0"}},
    }


def rising(width: int, steps: int) -> dict[str, Any]:
    """Objects whose properties are `width` times the next: none refers to itself, and
    width ** steps ways lead to the last."""
    defs: dict[str, Any] = {
        f"d{i}": {
            "type": "object",
            "properties": {f"p{j}": {"$ref": f"#/$defs/d{i + 1}"} for j in range(width)},
        }
        for i in range(steps)
    }
    return {
        "$defs": {**defs, f"d{steps}": {"type": "string"}},
        "properties": {"x": {"$ref": "#/$defs/d0"}},
    }


def repeated(depth: int) -> dict[str, Any]:
    """Objects in each other, each of which says eight times that it is one."""
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": ["object"] * 8, "properties": {"x": found}}
    return found


@pytest.mark.parametrize(
    "root", [branching(2), branching(8), ladder(18)], ids=["two", "many", "ladder"]
)
def test_parts_are_looked_at_once(root: dict[str, Any]) -> None:
    started = time.process_time()
    schema = root["properties"]["x"]
    assert "string" in types_of(schema, root)
    assert len(list(_string_nodes(schema, root, "$"))) < 20
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "root",
    [
        branching(2),
        branching(30),
        ladder(18),
        rising(8, 11),
        repeated(8),
        {"properties": {f"p{i}": {"$ref": "#"} for i in range(30)}},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 30}}},
    ],
    ids=["two", "many", "ladder", "rising", "repeated", "whole", "itself"],
)
def test_prompts_of_gpt_oss_stay_short(root: dict[str, Any]) -> None:
    """Catches references that are written out without end: a tool of 300 bytes held a server up for
    hours."""
    started = time.process_time()
    tools = [Tool(f"f{i}", root) for i in range(4)]
    prompt = render_harmony([], tools, current_date="2026-01-01")
    assert len(prompt) < 400_000
    assert time.process_time() - started < 2


def test_what_refers_to_itself_is_anything_within_itself() -> None:
    point = {"type": "object", "properties": {"next": {"$ref": "#/$defs/point"}}}
    both = {"first": {"$ref": "#/$defs/point"}, "second": {"$ref": "#/$defs/point"}}
    tool = Tool("f", {"$defs": {"point": point}, "properties": both})
    prompt = render_harmony([], [tool], current_date="2026-01-01")
    shown = "{\nnext?: any,\n}"
    assert f"(_: {{\nfirst?: {shown},\nsecond?: {shown},\n}}) => any" in prompt


def test_tagged_values_carry_the_definitions_that_they_use() -> None:
    """Catches a grammar that repeats all definitions for each property."""
    defs: dict[str, Any] = {f"d{i}": {"const": i} for i in range(300)}
    defs |= {"a/b": {"type": "array", "items": {"$ref": "#/$defs/d7"}}}
    properties: dict[str, Any] = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(300)}
    properties |= {"nested": {"items": {"$ref": "#/$defs/a~1b"}, "type": "array"}}
    spec = answer_grammar(TAGGED, [Tool("f", {"$defs": defs, "properties": properties})])
    assert spec is not None
    assert len(spec.source) < 200_000
    grammars = json.loads(spec.source)["grammars"].values()
    (nested,) = [json.loads(each["source"]) for each in grammars if "nested" in each["where"]]
    assert nested["$defs"] == {name: defs[name] for name in ("a/b", "d7")}


def test_a_text_of_many_options_looks_at_its_schema_once() -> None:
    """Catches work that grows with the square of the options."""
    options = [{"type": "string", "pattern": f"^x{i}$"} for i in range(3_000)]
    schema = {"anyOf": [*options, {"type": "integer"}]}
    started = time.process_time()
    assert answer_grammar(TAGGED, [Tool("f", {"properties": {"a": schema}})]) is not None
    assert time.process_time() - started < 3


@pytest.mark.parametrize("kind", ["string", "list"])
def test_schemas_that_make_a_grammar_too_long(kind: str) -> None:
    """Catches a few kilobytes that fill the memory."""
    values = [f"{i:01000}" if kind == "string" else [10**15 + i] * 60 for i in range(50)]
    properties = {f"p{i}": {"$ref": "#/$defs/large"} for i in range(300)}
    root = {"$defs": {"large": {"enum": values}}, "properties": properties}
    with pytest.raises(RequestError, match=r"tools\[0\].*longer than"):
        answer_grammar(TAGGED, [Tool("f", root)])


def test_a_reference_is_followed_as_far_as_it_is_short() -> None:
    assert resolved("#" + "/" * 999, {}) == {}
    assert resolved("#" + "/" * 1_000, {}) is None


def test_types_of_plain_schemas() -> None:
    root: dict[str, Any] = {"$defs": {"n": {"type": ["integer", "null"]}}}
    assert types_of({"$ref": "#/$defs/n"}, root) == {"integer", "null"}
    assert types_of({"anyOf": [{"type": "string"}, {"const": 1}]}, root) == {
        "string", "integer", "number",
    }  # fmt: skip
    assert types_of({"allOf": [{"type": "string"}, {"enum": ["a", 1]}]}, root) == {"string"}
    assert types_of(True, root) == types_of({}, root) == ALL_TYPES
