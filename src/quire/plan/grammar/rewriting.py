"""Writes a JSON Schema so that the grammar library holds to it as JSON Schema has it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from llguidance import LLMatcher

from quire.protocol.json_schema.limits import BOUNDS, held_bounds, held_counts
from quire.protocol.json_schema.name_cells import NameScopes
from quire.protocol.json_schema.patterns import whole_regex
from quire.protocol.json_schema.tree import modernize, subschemas
from quire.protocol.json_schema.types import listed, types_of
from quire.protocol.json_schema.unsupported import as_any_of

__all__ = ["rewrite"]

_DAY = "(0[1-9]|1[0-9]|2[0-8])"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    f"([0-9]{{4}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_ZONE = "([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = (
    f"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?{_ZONE}"
    "|23:59:60(\\.[0-9]+)?([Zz]|[+-]00:00))"
)
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
}
"""Formats that the library holds to less well: days of a month, and leap seconds, which are those
at the end of a day in UTC, written in UTC."""


def rewrite(schema: dict[str, Any]) -> None:
    """Change a schema of one's own, which `without_unsupported` has nothing against."""
    modernize(schema)
    nodes = _nodes_of(schema)
    for node in nodes:
        if "oneOf" in node:
            as_any_of(node)
        _rewrite_strings(node)
        _rewrite_bounds(node, schema)
        _rewrite_counts(node)
    if NameScopes(nodes).are_combined:
        for node in nodes:
            _write_out_values(node)
        nodes = _nodes_of(schema)
    scopes = NameScopes(nodes)
    changes = [(node, _names_of(node, scopes)) for node in nodes]
    for node, change in changes:
        if change is not None:
            _put_names(node, change)


def _names_of(node: dict[str, Any], scopes: NameScopes) -> dict[str, Any] | None:
    """Return what `NameScopes.split` does, if the library can tell that it is apart."""
    change = scopes.split(node)
    if change is None or _are_apart(tuple(change["patternProperties"])):
        return change
    return scopes.translated(node)


@functools.lru_cache(maxsize=256)
def _are_apart(patterns: tuple[str, ...]) -> bool:
    if len(patterns) < 2:
        return True
    schema = json.dumps({"type": "object", "patternProperties": dict.fromkeys(patterns, True)})
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def _nodes_of(schema: object) -> list[dict[str, Any]]:
    """Return every subschema once."""
    return list({id(node): node for _, node in subschemas("$", schema)}.values())


def _put_names(node: dict[str, Any], change: Mapping[str, Any]) -> None:
    """Put keywords of names where `properties` are: the library reads them together, and the order
    of all keywords is that of the properties."""
    items = list(node.items())
    first = next(name for name in ("properties", *change) if name in node)
    node.clear()
    for keyword, value in items:
        if keyword == first:
            node.update({keyword: value, **change})
        elif keyword not in change:
            node[keyword] = value


def _rewrite_strings(node: dict[str, Any]) -> None:
    if "pattern" in node:
        node["pattern"] = f"^(?:{whole_regex(node['pattern'])})$"
    pattern = _FORMATS.get(node.get("format", ""))
    if pattern is None:
        return
    del node["format"]
    if "pattern" in node:
        node["allOf"] = [*listed(node, "allOf"), {"pattern": pattern}]
    else:
        node["pattern"] = pattern


def _rewrite_bounds(node: dict[str, Any], root: Mapping[str, Any]) -> None:
    if BOUNDS & node.keys():
        bounds = held_bounds(node, types_of(node, root))
        for keyword in BOUNDS & node.keys():
            del node[keyword]
        node.update(bounds)


def _rewrite_counts(node: dict[str, Any]) -> None:
    redundant, one_of = held_counts(node)
    for keyword in redundant:
        del node[keyword]
    if one_of:
        options = {"anyOf": [{"required": [name]} for name in one_of]}
        node["allOf"] = [*listed(node, "allOf"), options]


def _write_out_values(node: dict[str, Any]) -> None:
    """Write listed objects as schemas, which get the cells of names that others have."""
    values: Sequence[object] = [node["const"]] if "const" in node else listed(node, "enum")
    if not any(isinstance(value, dict | list) for value in values):
        return
    node.pop("const", None)
    node.pop("enum", None)
    options = {"anyOf": [_schema_of(value) for value in values]}
    node["allOf"] = [*listed(node, "allOf"), options]


def _schema_of(value: object) -> dict[str, Any]:
    if isinstance(value, list):
        items = [_schema_of(item) for item in cast("list[object]", value)]
        closed = {"additionalItems": False, "minItems": len(items)}  # the same in all drafts
        return {"type": "array", "items": items or False, **closed}
    if not isinstance(value, dict):
        return {"const": value}
    named = cast("dict[str, object]", value)
    return {
        "type": "object",
        "properties": {name: _schema_of(each) for name, each in named.items()},
        "required": list(named),
        "additionalProperties": False,
    }
