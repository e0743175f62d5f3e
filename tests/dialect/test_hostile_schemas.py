"""Schemas that refer to themselves many times over, or say nonsense, cost little and end well."""

from __future__ import annotations

import time
from typing import Any

import pytest

from quire.dialect.argument_rules import _string_nodes
from quire.dialect.schema_types import ALL_TYPES, types_of


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


@pytest.mark.parametrize(
    "root", [branching(2), branching(8), ladder(18)], ids=["two", "many", "ladder"]
)
def test_parts_are_looked_at_once(root: dict[str, Any]) -> None:
    started = time.process_time()
    schema = root["properties"]["x"]
    assert "string" in types_of(schema, root)
    assert len(list(_string_nodes(schema, root, "$"))) < 20
    assert time.process_time() - started < 2


def test_types_of_plain_schemas() -> None:
    root: dict[str, Any] = {"$defs": {"n": {"type": ["integer", "null"]}}}
    assert types_of({"$ref": "#/$defs/n"}, root) == {"integer", "null"}
    assert types_of({"anyOf": [{"type": "string"}, {"const": 1}]}, root) == {
        "string", "integer", "number",
    }  # fmt: skip
    assert types_of({"allOf": [{"type": "string"}, {"enum": ["a", 1]}]}, root) == {"string"}
    assert types_of(True, root) == types_of({}, root) == ALL_TYPES
