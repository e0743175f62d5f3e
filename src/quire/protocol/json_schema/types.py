"""The JSON types that the values of a schema may have, and whether two schemas share a value."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from quire.protocol.json_schema.tree import resolved

__all__ = [
    "ALL_TYPES",
    "Comparison",
    "Schema",
    "json_types",
    "listed",
    "node",
    "resolved",
    "types_of",
]

Schema = Mapping[str, Any]

ALL_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
_NULL = frozenset(("null",))
_STRING = frozenset(("string",))
_ARRAY = frozenset(("array",))
_OBJECT = frozenset(("object",))


def node(schema: object) -> Schema:
    """Return the keywords of a schema; empty for `true` and for anything that is no schema."""
    return cast("Schema", schema) if isinstance(schema, Mapping) else {}


def listed(schema: Schema, keyword: str) -> Sequence[Any]:
    """Return the list under a keyword, empty if there is none."""
    found = schema.get(keyword)
    return cast("list[Any]", found) if isinstance(found, list) else ()


def json_types(value: object) -> frozenset[str]:
    """Return the names of types by which a schema may describe a value."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int):
        return frozenset(("integer", "number"))
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return frozenset(name for kind, name in names.items() if isinstance(value, kind)) or _NULL


def types_of(
    schema: object, root: Schema, known: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """Return the types that a schema allows, all of them if it does not say. root: the schema that
    its references address. known: results for parts of the schema, by identity, which later calls
    may share. Each part is visited once, even if it refers to itself."""
    known = {} if known is None else known
    if (found := known.get(id(schema))) is not None:
        return found
    known[id(schema)] = found = ALL_TYPES  # for a part that refers to itself
    its = node(schema)
    kinds = [its["type"]] if isinstance(its.get("type"), str) else listed(its, "type")
    if kinds:
        found &= frozenset(kind for kind in kinds if isinstance(kind, str)) & ALL_TYPES or ALL_TYPES
    values = [its["const"]] if "const" in its else listed(its, "enum")
    if values:
        found &= frozenset[str]().union(*map(json_types, values))
    if (target := resolved(its.get("$ref"), root)) is not None:
        found &= types_of(target, root, known)
    for keyword in ("anyOf", "oneOf"):
        options = [types_of(option, root, known) for option in listed(its, keyword)]
        if options:
            found &= frozenset[str]().union(*options)
    for part in listed(its, "allOf"):
        found &= types_of(part, root, known)
    known[id(schema)] = found = found or ALL_TYPES
    return found


MAX_DEPTH = 8
"""Deepest parts of schemas that are compared."""
MAX_PARTS = 400
"""Most parts of a schema that hold where it does."""


class Comparison:
    """Finds schemas that share a value. What it has compared of one root is known later. num_left:
    parts that may yet be looked at, which take some 0.2 s in all at first; without any, all else
    may share a value."""

    MAX_WORK = 150_000
    WORK_PER_NODE = 50

    def __init__(self, num_nodes: int) -> None:
        """num_nodes: subschemas of the root."""
        self.num_left = self.MAX_WORK + self.WORK_PER_NODE * num_nodes

    def overlapping(self, schemas: Sequence[object], root: Schema) -> tuple[int, int] | None:
        """Return the places of two schemas of which it is not plain that no value satisfies
        both."""
        compared = _Compared(root, self)
        outlines: list[_Outline] = []
        for i, one in enumerate(schemas):
            outlines.append(compared.outline(one))
            for j, other in enumerate(schemas[:i]):
                self.num_left -= outlines[j].num_steps
                if self.num_left < 0:
                    return j, i
                if not outlines[i].is_apart(outlines[j]) and not compared.are_disjoint(
                    other, one, MAX_DEPTH
                ):
                    return j, i
        return None


@dataclass(frozen=True, slots=True)
class _Outline:
    """Tells at a glance that two schemas share no value, by their types, the only values that
    they allow, and those of properties."""

    types: frozenset[str]
    values: frozenset[str] | None
    of_properties: Mapping[str, frozenset[str]]
    required: frozenset[str]
    num_steps: int

    def is_apart(self, other: _Outline) -> bool:
        kinds = self.types & other.types
        if not kinds:
            return True
        if self.values is not None and other.values is not None:
            return self.values.isdisjoint(other.values)
        return kinds == _OBJECT and any(
            values.isdisjoint(other.of_properties[name])
            for name, values in self.of_properties.items()
            if name in other.of_properties and (name in self.required or name in other.required)
        )


class _Compared:
    """Compares parts of one schema."""

    def __init__(self, root: Schema, work: Comparison) -> None:
        self._root = root
        self._work = work
        self._known: dict[int, frozenset[str]] = {}
        self._parts_of: dict[int, list[Schema]] = {}
        self._values_of: dict[int, frozenset[str]] = {}

    def outline(self, schema: object) -> _Outline:
        parts, values = self._parts(schema), self._values(schema)
        of_properties: dict[str, frozenset[str]] = {}
        for name in dict.fromkeys(key for part in parts for key in node(part.get("properties"))):
            listings = map(self._values, _of_property(parts, name))
            if found := [listing for listing in listings if listing is not None]:
                of_properties[name] = functools.reduce(frozenset[str].__and__, found)
        num_listed = sum(map(len, (values or (), *of_properties.values())))
        return _Outline(
            self._types(schema),
            values,
            of_properties,
            frozenset(_required(parts)),
            1 + num_listed // 16,
        )

    def are_disjoint(self, one: object, other: object, depth: int) -> bool:
        self._work.num_left -= 1
        if one is False or other is False:
            return True
        if depth == 0 or self._work.num_left < 0:
            return False
        for first, second in ((one, other), (other, one)):
            for part in self._parts(first):
                for keyword in ("anyOf", "oneOf"):
                    options = listed(part, keyword)
                    if options and all(
                        self.are_disjoint(option, second, depth - 1) for option in options
                    ):
                        return True
        kinds = self._types(one) & self._types(other)
        if not kinds:
            return True
        values, others = self._values(one), self._values(other)
        if values is not None and others is not None:
            return values.isdisjoint(others)
        if kinds <= {"integer", "number"}:
            return self._are_apart(one, other, "minimum", "maximum")
        if kinds == _STRING:
            return self._are_apart(one, other, "minLength", "maxLength")
        if kinds == _ARRAY:
            return self._are_apart(one, other, "minItems", "maxItems")
        return kinds == _OBJECT and self._have_disjoint_properties(one, other, depth)

    def _types(self, schema: object) -> frozenset[str]:
        found = types_of(schema, self._root, self._known)
        return found | {"integer"} if "number" in found else found

    def _parts(self, schema: object) -> list[Schema]:
        """Return the schemas that all hold where one does."""
        key = id(schema)
        if key not in self._parts_of:
            found: dict[int, Schema] = {}
            waiting = [schema]
            while waiting and len(found) < MAX_PARTS:
                its = node(waiting.pop())
                if id(its) not in found:
                    found[id(its)] = its
                    waiting += listed(its, "allOf")
                    if (target := resolved(its.get("$ref"), self._root)) is not None:
                        waiting.append(target)
            self._parts_of[key] = list(found.values())
        self._work.num_left -= len(self._parts_of[key])
        return self._parts_of[key]

    def _values(self, schema: object) -> frozenset[str] | None:
        """Return the only values that a schema allows, as JSON; None if it does not list them."""
        for its in self._parts(schema):
            values = [its["const"]] if "const" in its else its.get("enum")
            if isinstance(values, list):
                if id(its) not in self._values_of:
                    listing = cast("list[object]", values)
                    self._work.num_left -= len(listing)
                    self._values_of[id(its)] = frozenset(map(_canonical, listing))
                return self._values_of[id(its)]
        return None

    def _are_apart(self, one: object, other: object, low: str, high: str) -> bool:
        """Return whether one schema's values end before the other's begin."""
        for first, second in ((one, other), (other, one)):
            ends = [part[high] for part in self._parts(first) if _is_number(part.get(high))]
            starts = [part[low] for part in self._parts(second) if _is_number(part.get(low))]
            if ends and starts and min(ends) < max(starts):
                return True
        return False

    def _have_disjoint_properties(self, one: object, other: object, depth: int) -> bool:
        parts, others = self._parts(one), self._parts(other)
        names = dict.fromkeys(_required((*parts, *others)))
        return any(
            self.are_disjoint(mine, theirs, depth - 1)
            for name in names
            for mine in _of_property(parts, name)
            for theirs in _of_property(others, name)
        )


def _required(parts: Iterable[Schema]) -> list[str]:
    names = (name for part in parts for name in listed(part, "required"))
    return [name for name in names if isinstance(name, str)]


def _of_property(parts: Sequence[Schema], name: str) -> list[object]:
    """Return the schemas that the value of a property has to satisfy."""
    found: list[object] = []
    for part in parts:
        names = node(part.get("properties"))
        if name in names:
            found.append(names[name])
        elif "patternProperties" not in part and "additionalProperties" in part:
            found.append(part["additionalProperties"])
    return found or [True]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _canonical(value: object) -> str:
    """Return a value as JSON, the same for 1 and 1.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, cast('list[object]', value)))}]"
    if isinstance(value, dict):
        items = sorted(cast("dict[str, object]", value).items())
        return f"{{{','.join(f'{json.dumps(key)}:{_canonical(each)}' for key, each in items)}}}"
    return json.dumps(value)
