"""Checks of a JSON Schema before it is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote

__all__ = ["find_endless", "find_unsupported", "is_too_deep"]

MAX_DEPTH = 128
"""Deepest nesting of arrays and objects; the grammar library takes no deeper ones."""

MAX_CHECKS = 500_000
"""Most checks of subschemas, which take about a second. A tangle of references could ask for their
square."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
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

Node = tuple[str, dict[str, Any]]
"""A subschema and its path from the root, `$`."""


def is_too_deep(value: object) -> bool:
    """Return whether arrays and objects are nested deeper than `MAX_DEPTH`."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return True


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []


def find_unsupported(schema: object) -> str | None:
    """The path of the first keyword that no grammar can hold to, with what it says; None if there
    is none."""
    for path, node in _subschemas("$", schema):
        for keyword in _REFUSED:
            if keyword in node:
                return f"{path}.{keyword}"
        pattern, form, reference = node.get("pattern"), node.get("format"), node.get("$ref")
        if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern):
            return f"{path}.pattern ({pattern[:80]!r} looks around or back)"
        if isinstance(form, str) and form not in _FORMATS:
            return f"{path}.format ({form[:80]!r})"
        if isinstance(reference, str) and re.match(r"[a-z][a-z0-9+.-]*://", reference):
            return f"{path}.$ref ({reference[:80]!r} lies elsewhere)"
    return None


def _subschemas(path: str, schema: object) -> Iterator[Node]:
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
        for keyword in _LISTS:
            found = node.get(keyword)
            if isinstance(found, list):
                items = cast("list[object]", found)
                inner += [(f"{path}.{keyword}[{i}]", each) for i, each in enumerate(items)]
        inner += [(f"{path}.{keyword}", node[keyword]) for keyword in _ONE if keyword in node]
        waiting += reversed(inner)


def find_endless(schema: object) -> str | None:
    """The path of a subschema that no finite value satisfies, since it needs itself again; None if
    the root has one. References by anchors and ids are taken to have one, and so is what would take
    long to find out."""
    nodes = {id(node): (path, node) for path, node in _subschemas("$", schema)}
    by_path = dict(nodes.values())
    finite: set[int] = set()
    left, num_checked, had_new = list(reversed(nodes)), 0, True
    while had_new and num_checked < MAX_CHECKS:
        num_checked += len(left)
        for key in left:  # inner ones first, later definitions first; then the other way round
            if _is_finite(nodes[key][1], finite, by_path):
                finite.add(key)
        rest = [key for key in reversed(left) if key not in finite]
        had_new, left = len(rest) < len(left), rest
    if had_new:
        return None
    if not isinstance(schema, dict) or id(cast("object", schema)) in finite:
        return None
    return next(path for key, (path, _) in nodes.items() if key not in finite)


def _is_finite(node: dict[str, Any], finite: set[int], by_path: dict[str, Any]) -> bool:
    """Return whether the node has a finite value if those of `finite` have."""

    def ends(schema: object) -> bool:
        return not isinstance(schema, dict) or id(cast("object", schema)) in finite

    reference = node.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        target = by_path.get(_path_of(reference))
        if target is not None and not ends(target):
            return False
    for keyword in ("anyOf", "oneOf"):
        options = node.get(keyword)
        if isinstance(options, list) and options and not any(map(ends, cast("list[Any]", options))):
            return False
    if not all(map(ends, _listed(node, "allOf"))):
        return False
    properties, required = node.get("properties"), _listed(node, "required")
    if isinstance(properties, dict) and "object" in _types(node):
        named = cast("dict[str, Any]", properties)
        if not all(
            ends(named[name]) for name in required if isinstance(name, str) and name in named
        ):
            return False
    least = node.get("minItems")
    if isinstance(least, int) and least > 0 and "array" in _types(node):
        prefix = _listed(node, "prefixItems")[:least]
        rest = [node["items"]] if len(prefix) < least and "items" in node else []
        return all(map(ends, [*prefix, *rest]))
    return True


def _types(node: dict[str, Any]) -> list[Any]:
    """A schema without a type, or with several, may be satisfied by another one."""
    kind = node.get("type")
    return [kind] if isinstance(kind, str) else []


def _listed(node: dict[str, Any], keyword: str) -> list[Any]:
    found = node.get(keyword)
    return cast("list[Any]", found) if isinstance(found, list) else []


def _path_of(reference: str) -> str:
    """The path by which `_subschemas` names what a JSON pointer refers to."""
    path = "$"
    for part in unquote(reference).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        path += (
            f"[{name}]" if name.isdecimal() and path.rpartition(".")[2] in _LISTS else f".{name}"
        )
    return path
