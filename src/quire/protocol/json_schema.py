"""The subschemas of a JSON Schema, and the keywords that no grammar can hold to."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, cast

__all__ = [
    "LISTS",
    "Node",
    "all_unsupported",
    "find_unsupported",
    "relaxed",
    "subschemas",
]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
_ONE = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_REFUSED = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems",
    "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")

_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
)

Node = tuple[str, dict[str, Any]]
"""A subschema and its path from the root, `$`."""


def find_unsupported(schema: object) -> str | None:
    """The path of the first keyword that no grammar can hold to, with what it says; None if there
    is none."""
    return next(_unsupported(schema), None)


def all_unsupported(schema: object) -> list[str]:
    """List the paths of all keywords that no grammar can hold to, or that say nothing usable."""
    found = list(_unsupported(schema))
    known = {place.partition(" (")[0] for place in found}
    for path, node in subschemas("$", schema):
        places = [f"{path}.{key}" for key, value in node.items() if not _is_usable(key, value)]
        found += [place for place in places if place not in known]
    return found


def relaxed(schema: object) -> tuple[object, list[str]]:
    """Copy a schema without what the grammar library takes in no form; list the paths of that:
    types that there are none of, references to elsewhere, patterns that look around, counts that
    are none."""
    found = copy.deepcopy(schema)
    dropped: list[str] = []
    for path, node in subschemas("$", found):
        for keyword in [key for key in node if not _is_usable(key, node[key])]:
            dropped.append(f"{path}.{keyword}")
            del node[keyword]
        for keyword in _COUNTS & node.keys():
            node[keyword] = int(node[keyword])
        patterns = node.get("patternProperties", {})
        for pattern in [each for each in patterns if _LOOKS_AROUND.search(each)]:
            dropped.append(f"{path}.patternProperties ({pattern[:80]!r} looks around or back)")
            del patterns[pattern]
    return found, dropped


def _is_usable(keyword: str, value: object) -> bool:
    match keyword:
        case "type":
            names = cast("list[object]", value) if isinstance(value, list) else [value]
            return bool(names) and all(name in _TYPES for name in names)
        case "pattern":
            return isinstance(value, str) and not _LOOKS_AROUND.search(value)
        case "$ref":
            return isinstance(value, str) and value.startswith("#")
        case "enum" | "anyOf" | "oneOf" | "allOf":
            return isinstance(value, list) and bool(cast("list[object]", value))
        case "required":
            return isinstance(value, list)
        case "properties" | "patternProperties" | "$defs" | "definitions":
            return isinstance(value, dict)
        case "items" | "additionalProperties":
            return isinstance(value, dict | bool)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "multipleOf":
            return isinstance(value, int | float) and value > 0
        case _ if keyword in _COUNTS:
            return isinstance(value, int | float) and value >= 0 and value == int(value)
        case _:
            return True


def _unsupported(schema: object) -> Iterator[str]:
    """The path of each such keyword, with what it says."""
    for path, node in subschemas("$", schema):
        yield from (f"{path}.{keyword}" for keyword in _REFUSED if keyword in node)
        pattern, form, reference = node.get("pattern"), node.get("format"), node.get("$ref")
        if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern):
            yield f"{path}.pattern ({pattern[:80]!r} looks around or back)"
        if isinstance(form, str) and form not in _FORMATS:
            yield f"{path}.format ({form[:80]!r})"
        if isinstance(reference, str) and re.match(r"[a-z][a-z0-9+.-]*://", reference):
            yield f"{path}.$ref ({reference[:80]!r} lies elsewhere)"
        named = node.get("patternProperties")
        for key in cast("dict[str, Any]", named) if isinstance(named, dict) else {}:
            if _LOOKS_AROUND.search(key):
                yield f"{path}.patternProperties ({key[:80]!r} looks around or back)"


def subschemas(path: str, schema: object) -> Iterator[Node]:
    """Every subschema, outer ones first."""
    waiting: list[tuple[str, object]] = [(path, schema)]
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        node = cast("dict[str, Any]", schema)
        yield path, node
        inner: list[tuple[str, object]] = []
        for keyword in _MAPS:
            found = node.get(keyword)
            if isinstance(found, dict):
                named = cast("dict[str, object]", found)
                inner += [(f"{path}.{keyword}.{name}", each) for name, each in named.items()]
        for keyword in LISTS:
            found = node.get(keyword)
            if isinstance(found, list):
                items = cast("list[object]", found)
                inner += [(f"{path}.{keyword}[{i}]", each) for i, each in enumerate(items)]
        inner += [(f"{path}.{keyword}", node[keyword]) for keyword in _ONE if keyword in node]
        waiting += reversed(inner)
