"""The JSON types that the values of a schema may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from quire.protocol.json_schema import resolved

__all__ = ["ALL_TYPES", "Schema", "json_types", "listed", "node", "resolved", "types_of"]

Schema = Mapping[str, Any]

ALL_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
_NULL = frozenset(("null",))


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
