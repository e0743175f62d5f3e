"""The subschemas of a JSON Schema, and the keywords that no grammar can hold to."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urljoin

__all__ = [
    "LISTS",
    "Node",
    "all_unsupported",
    "allow_others",
    "find_unsupported",
    "resolved",
    "subschemas",
    "without_unsupported",
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
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
)
_MAX_COUNT = 2**31 - 1
"""No text or list is longer, and the grammar library takes no larger numbers."""

_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\(?:[1-9]|k<|[bB])")
_LETTER_ESCAPE = re.compile(
    r"\\(?:[dDsSwWnrtfvaAz]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xu]\{[0-9a-fA-F]+\}|[pP](?:[A-Z]|\{[^{}]+\}))"
)
_MAX_REFERENCE_CHARS = 1_000
"""A reference may be looked up thousands of times."""
_MAX_NAME_CHARS = 250
"""Longer names are no relative ones. Each may be joined to thousands."""

_BASE = "file:///"
"""Names are relative to this where the root has none."""

Node = tuple[str, dict[str, Any]]
"""A subschema and its path from the root, `$`."""


def find_unsupported(schema: object) -> str | None:
    """The path of the first keyword that no grammar can hold to, with what it says; None if there
    is none."""
    return next((place for place, _, _ in _unsupported(_placed(schema))), None)


def all_unsupported(schema: object) -> list[str]:
    """The paths of all keywords that no grammar can hold to."""
    return without_unsupported(copy.deepcopy(schema))


def without_unsupported(schema: object) -> list[str]:
    """Remove all that no grammar can hold to from a schema of one's own. Returns the paths."""
    placed = _placed(schema)
    found = list(_unsupported(placed))
    for _, holder, name in found:
        del holder[name]
    cut = {id(holder) for _, holder, _ in found}
    wholes = {each.base: each.whole for each in reversed(placed)}
    bases = {id(each.node): each.base for each in reversed(placed)}
    malformed: list[str] = []
    for path, node in subschemas("$", schema):
        for keyword in _MAPS:
            held = node.get(keyword)
            if isinstance(held, dict):
                malformed += _open_malformed(f"{path}.{keyword}", cast("Any", held))
        named = node.get("patternProperties")
        if isinstance(named, dict):
            names = cast("dict[str, Any]", named)
            irregular = [key for key in names if not _is_regular(key)]
            for key in irregular:
                malformed.append(f"{path}.patternProperties ({key[:80]!r} is none)")
                del names[key]
            if irregular or id(names) in cut:
                malformed += allow_others(path, node)
        wrong = [key for key, value in node.items() if not _is_well_formed(key, value)]
        malformed += [f"{path}.{key} ({str(node.pop(key))[:80]!r} is none)" for key in wrong]
        reference = str(node.get("$ref"))
        pointer = f"#{reference.partition('#')[2]}"
        whole = wholes.get(_joined(bases.get(id(node), _BASE), reference), {})
        if pointer.startswith("#/") and resolved(pointer, whole) is None:
            malformed.append(f"{path}.$ref ({node.pop('$ref')[:80]!r} leads nowhere)")
        for keyword in _COUNTS & node.keys():
            node[keyword] = int(node[keyword])  # the library takes no 1.0
    return [*(place for place, _, _ in found), *malformed]


def allow_others(path: str, node: dict[str, Any]) -> list[str]:
    """Let an object have all other properties, since names of some are dropped, and those would be
    others. Returns the path of what that takes."""
    if node.get("additionalProperties", True) is True:
        return []
    del node["additionalProperties"]
    return [f"{path}.additionalProperties (others have dropped names)"]


def _open_malformed(path: str, schemas: dict[str, Any]) -> list[str]:
    """Replace what is no schema by one that allows everything. Returns the paths."""
    wrong = [name for name, each in schemas.items() if not isinstance(each, dict | bool)]
    found = [f"{path}.{name} ({str(schemas[name])[:80]!r} is none)" for name in wrong]
    schemas.update((name, {}) for name in wrong)
    return found


def _is_well_formed(keyword: str, value: object) -> bool:
    """Tell whether a keyword has a value of the kind that it takes."""
    match keyword:
        case "type":
            names = cast("list[object]", value) if isinstance(value, list) else [value]
            return bool(names) and all(name in _TYPES for name in names)
        case "enum":
            return isinstance(value, list) and bool(cast("list[object]", value))
        case "anyOf" | "oneOf" | "allOf" | "required":
            kinds = (str,) if keyword == "required" else (dict, bool)
            return _all_are(value, *kinds) and (bool(value) or keyword == "required")
        case "items":
            return isinstance(value, dict | bool | list)
        case "pattern":
            return isinstance(value, str) and _is_regular(value)
        case "$ref":
            return isinstance(value, str)
        case "properties" | "patternProperties" | "$defs" | "definitions":
            return isinstance(value, dict)
        case "additionalProperties":
            return isinstance(value, dict | bool)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "multipleOf":
            return isinstance(value, int | float) and value > 0
        case _ if keyword in _COUNTS:
            return isinstance(value, int | float) and 0 <= value <= _MAX_COUNT and value % 1 == 0
        case _:
            return True


def _all_are(value: object, *kinds: type) -> bool:
    """Tell whether a value is a list of nothing but these."""
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    return all(isinstance(item, kinds) for item in items)


def _unsupported(placed: list[_Placed]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The path of each such keyword, what holds it, and its name there."""
    names = frozenset(each.base for each in placed)
    for path, node, _, base in placed:
        for keyword in _REFUSED:
            if keyword in node:
                yield f"{path}.{keyword}", node, keyword
        pattern, form, reference = node.get("pattern"), node.get("format"), node.get("$ref")
        if isinstance(pattern, str) and _looks_around(pattern):
            yield f"{path}.pattern ({pattern[:80]!r} looks around or back)", node, "pattern"
        if isinstance(form, str) and form not in _FORMATS:
            yield f"{path}.format ({form[:80]!r})", node, "format"
        if isinstance(reference, str) and _joined(base, reference) not in names:
            yield f"{path}.$ref ({reference[:80]!r} lies elsewhere)", node, "$ref"
        named = node.get("patternProperties")
        if isinstance(named, dict):
            patterns = cast("dict[str, Any]", named)
            for key in [key for key in patterns if _looks_around(key)]:
                place = f"{path}.patternProperties ({key[:80]!r} looks around or back)"
                yield place, patterns, key


def _looks_around(pattern: str) -> bool:
    return _LOOKS_AROUND.search(pattern.replace("\\\\", "")) is not None


def _is_regular(pattern: str) -> bool:
    """Return False for escapes that regular expressions of the grammar library lack."""
    plain = _LETTER_ESCAPE.sub("", pattern.replace("\\\\", ""))
    return re.search(r"\\[a-zA-Z0-9]", plain) is None


class _Placed(NamedTuple):
    """A subschema. whole: the nearest one around it that has an `$id`, or the root, from which
    JSON pointers lead. base: the name of that, which other names are relative to."""

    path: str
    node: dict[str, Any]
    whole: dict[str, Any]
    base: str


def _joined(base: str, reference: str) -> str:
    """Return the whole name of what a reference leads to, without its fragment."""
    name = reference.partition("#")[0]
    if not name:
        return base
    if max(len(base), len(name)) > _MAX_NAME_CHARS:
        return name
    try:
        return urljoin(base, name)
    except ValueError:  # no address
        return name


def subschemas(path: str, schema: object) -> Iterator[Node]:
    """Every subschema, outer ones first."""
    waiting: list[tuple[str, object]] = [(path, schema)]
    while waiting:
        path, schema = waiting.pop()
        if isinstance(schema, dict):
            node = cast("dict[str, Any]", schema)
            yield path, node
            waiting += reversed(_inner(path, node))


def _placed(schema: object) -> list[_Placed]:
    """Return every subschema, as `subschemas` does."""
    found: list[_Placed] = []
    waiting: list[tuple[str, object, dict[str, Any] | None, str]] = [("$", schema, None, _BASE)]
    while waiting:
        path, schema, whole, base = waiting.pop()
        if not isinstance(schema, dict):
            continue
        node = cast("dict[str, Any]", schema)
        name: object = node.get("$id")
        if isinstance(name, str):
            whole, base = node, _joined(base, name)
        whole = node if whole is None else whole
        found.append(_Placed(path, node, whole, base))
        waiting += [(path, each, whole, base) for path, each in reversed(_inner(path, node))]
    return found


def _inner(path: str, node: dict[str, Any]) -> list[tuple[str, object]]:
    """Return what stands in the places of a schema where subschemas are, by path."""
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
