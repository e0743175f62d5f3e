"""The subschemas of a JSON Schema, and what its references lead to."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard, cast
from urllib.parse import unquote

__all__ = [
    "COUNTED",
    "LISTS",
    "MAPS",
    "Node",
    "inner_schemas",
    "modernize",
    "resolved",
    "subschemas",
    "with_targets",
]

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
_ONE = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
COUNTED = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
)
_MAX_REFERENCE_CHARS = 1_000
"""A reference may be looked up thousands of times."""

Node = tuple[str, dict[str, Any]]
"""A subschema and its path from the root, `$`."""


def subschemas(path: str, schema: object) -> Iterator[Node]:
    """Every subschema, outer ones first."""
    waiting: list[tuple[str, object]] = [(path, schema)]
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, dict):
            node = cast("dict[str, Any]", schema)
            yield path, node
            waiting += reversed(inner_schemas(path, node))


def with_targets(schema: object) -> Iterator[Node]:
    """Yield every subschema once, and those that references lead to beside them, as to
    `#/components/…`."""
    root = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    waiting: list[tuple[str, object]] = [("$", root)]
    targets: list[tuple[str, object]] = []
    seen: set[int] = set()
    while waiting or targets:
        path, each = (waiting or targets).pop()
        if not isinstance(each, dict) or id(cast("object", each)) in seen:
            continue
        node = cast("dict[str, Any]", each)
        seen.add(id(node))
        yield path, node
        waiting += reversed(inner_schemas(path, node))
        if _is_pointer(reference := node.get("$ref")):
            place = unquote(reference).removeprefix("#").replace("/", ".").replace("~1", "/")
            targets.append((f"${place.replace('~0', '~')}", resolved(reference, root)))


def _is_pointer(reference: object) -> TypeGuard[str]:
    return isinstance(reference, str) and reference.startswith("#/")


def inner_schemas(path: str, node: dict[str, Any]) -> list[tuple[str, object]]:
    """Return what stands in the places of a schema where subschemas are, by path."""
    inner: list[tuple[str, object]] = []
    for keyword in MAPS:
        found = node.get(keyword)
        if isinstance(found, dict):
            named = cast("dict[str, object]", found)
            inner += [(f"{path}.{keyword}.{name}", each) for name, each in named.items()]
    for keyword in LISTS:
        found = node.get(keyword)
        if isinstance(found, list):
            items = cast("list[object]", found)
            inner += [(f"{path}.{keyword}[{i}]", each) for i, each in enumerate(items)]
    return inner + [(f"{path}.{keyword}", node[keyword]) for keyword in _ONE if keyword in node]


def resolved(reference: object, root: Mapping[str, Any]) -> object:
    """Return the target of a JSON pointer within the schema; None if there is none, or the pointer
    is too long."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    if len(reference) > _MAX_REFERENCE_CHARS:
        return None
    place: Any = root
    for part in filter(None, unquote(reference[1:]).split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            place = place[int(key) if isinstance(place, list) else key]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return cast("object", place)


_OLD = re.compile(r"https?://json-schema\.org/draft-0[3467]/")
KEPT = "x-quire-kept"
_NOT_IGNORED = ("$ref", "definitions", "$defs")


def modernize(schema: object) -> None:
    """Change a schema of one's own to the words of draft 2020-12. `$schema` goes, so that a second
    time changes nothing."""
    if not isinstance(schema, dict):
        return
    root = cast("dict[str, Any]", schema)
    is_old = _OLD.match(str(root.get("$schema"))) is not None
    for _, node in list(subschemas("$", root)):
        if is_old and isinstance(node.get("$ref"), str):
            for keyword in [keyword for keyword in node if keyword not in _NOT_IGNORED]:
                del node[keyword]
        name = node.get("$id")
        if isinstance(name, str) and name.startswith("#"):
            node.setdefault("$anchor", node.pop("$id")[1:])
        if "$dynamicAnchor" in node:
            node.setdefault("$anchor", node.pop("$dynamicAnchor"))
        for keyword in ("minimum", "maximum"):
            exclusive = f"exclusive{keyword.capitalize()}"
            if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and keyword in node:
                node[exclusive] = node.pop(keyword)
        for keyword in COUNTED & node.keys():
            number = node[keyword]
            if isinstance(number, float) and number.is_integer():
                node[keyword] = int(number)  # the grammar library takes no 1.0
        node.pop("$schema", None)
    _keep_targets(root)


def _keep_targets(root: dict[str, Any]) -> None:
    """Give targets of references that a rewriting may move a second place."""
    there: object = root.get(KEPT)
    kept = cast("dict[str, Any]", there) if isinstance(there, dict) else {}
    free = (name for name in map(str, itertools.count()) if name not in kept)
    for _, node in list(subschemas("$", root)):
        reference = node.get("$ref")
        if not _is_pointer(reference):
            continue
        if "/oneOf/" in reference or "/patternProperties/" in reference:
            target = resolved(reference, root)
            if isinstance(target, dict | bool):
                name = next(free)
                kept[name] = target
                root[KEPT] = kept
                node["$ref"] = f"#/{KEPT}/{name}"
