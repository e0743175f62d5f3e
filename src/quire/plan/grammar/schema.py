"""Checks of a JSON Schema before it is compiled."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import unquote

from quire.protocol.json_schema import LISTS, subschemas

__all__ = ["find_endless", "is_too_deep"]

MAX_DEPTH = 128
"""Deepest nesting of arrays and objects; the grammar library takes no deeper ones."""

MAX_CHECKS = 500_000
"""Most checks of subschemas, which take about a second. A tangle of references could ask for their
square."""


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


def find_endless(schema: object) -> str | None:
    """The path of a subschema that no finite value satisfies, since it needs itself again; None if
    the root has one. References by anchors and ids are taken to have one, and so is what would take
    long to find out."""
    nodes = {id(node): (path, node) for path, node in subschemas("$", schema)}
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
        path += f"[{name}]" if name.isdecimal() and path.rpartition(".")[2] in LISTS else f".{name}"
    return path
