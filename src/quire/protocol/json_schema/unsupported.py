"""The keywords of a JSON Schema that no grammar can hold to."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast
from urllib.parse import urljoin

import msgspec

from quire.protocol.json_schema.limits import (
    BOUNDS,
    COUNTS,
    LimitError,
    factor_fault,
    held_bounds,
    held_counts,
    is_held,
)
from quire.protocol.json_schema.name_cells import NameScopes
from quire.protocol.json_schema.patterns import PatternError, whole_language
from quire.protocol.json_schema.tree import (
    COUNTED,
    MAPS,
    inner_schemas,
    modernize,
    resolved,
    subschemas,
    with_targets,
)
from quire.protocol.json_schema.types import Comparison, types_of

__all__ = [
    "all_unsupported",
    "allow_others",
    "as_any_of",
    "find_malformed",
    "find_unknown_type",
    "find_unsupported",
    "num_chars_to_read",
    "without_unsupported",
]

_REFUSED = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
    "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems",
    "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_NO_TYPE = f"is no type: use one of {', '.join(_TYPES)}, or a list of them"
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("pattern", "format", "$ref", "$id", "$anchor"), str),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), dict),
    **dict.fromkeys(("additionalProperties", "additionalItems"), (dict, bool)),
}
"""Kinds of values of the keywords that take any of a kind."""

_MAX_COUNT = 2**31 - 1
"""No text or list is longer, and the grammar library takes no larger numbers."""

_MAX_NAME_CHARS = 250
"""Longer names are no relative ones. Each may be joined to thousands."""

_MAX_OPTIONS = 100
"""Most options of a `oneOf` that are compared with each other."""

_COMPARED = re.compile(rb'"oneOf"|"patternProperties"|\(\?[a-z]*i|\\u')
"""Parts of JSON that take long to read, or may be spellings of such."""
_COMPARED_CHARS = 200
"""About as many times longer it takes."""

_BASE = "file:///"
"""Names are relative to this where the root has none."""


def num_chars_to_read(schema: object) -> int:
    """Return the characters of a schema, or of the JSON of one: more than there are where parts of
    it may have to be compared with each other, which takes longer."""
    text = (
        schema.encode(errors="replace") if isinstance(schema, str) else msgspec.json.encode(schema)
    )
    return len(text) * (_COMPARED_CHARS if _COMPARED.search(text) else 1)


def find_malformed(schema: object) -> str | None:
    """Return the path of a keyword whose value has a kind that it does not take, with the value;
    None if there is none. schema: result of `modernize`."""
    own = copy.deepcopy(schema)
    return next(iter(_without_malformed(own, _placed(own))), None)


def find_unknown_type(schema: object) -> str | None:
    """Return the path of a type that JSON has not, with what there is; None if all are known.
    schema: result of `modernize`."""
    for path, node in with_targets(schema):
        if "type" in node and not _is_well_formed("type", node["type"]):
            return f"{path}.type ({_shown(node['type'])} {_NO_TYPE})"
    return None


def find_unsupported(schema: object) -> str | None:
    """The path of the first keyword that no grammar can hold to, with what it says; None if there
    is none."""
    return next((place for place, _, _ in _unsupported(_placed(schema))), None)


def all_unsupported(schema: object) -> list[str]:
    """The paths of all keywords that no grammar can hold to."""
    return without_unsupported(copy.deepcopy(schema))


def without_unsupported(schema: object) -> list[str]:
    """Remove all that no grammar can hold to from a schema of one's own. Returns the paths. Where
    the options of `oneOf` may overlap, `anyOf` takes its place."""
    modernize(schema)
    placed = _placed(schema)
    malformed = _without_malformed(schema, placed)
    found = list(_unsupported(placed))
    for _, holder, name in found:
        _remove(holder, name)
    paths = [place for place, _, _ in found]
    cut = {id(holder) for _, holder, _ in found}
    for path, node in subschemas("$", schema):
        if id(node.get("patternProperties")) in cut:
            paths += allow_others(path, node)
        if why := factor_fault(node.get("multipleOf")):
            paths.append(f"{path}.multipleOf ({str(node.pop('multipleOf'))[:80]} {why})")
    return [*paths, *malformed]


def _remove(holder: dict[str, Any] | list[Any], name: Any) -> None:
    if isinstance(holder, list):  # of listed values, of which one is removed
        holder[:] = [value for value in holder if value is not name]
    elif name == "oneOf":
        as_any_of(holder)
    else:
        del holder[name]


def as_any_of(node: dict[str, Any]) -> None:
    """Put `anyOf` in the place of `oneOf`."""
    items = list(node.items())
    options, has_others = node["oneOf"], "anyOf" in node
    node.clear()
    for keyword, value in items:
        if keyword != "oneOf":
            node[keyword] = value
        elif not has_others:
            node["anyOf"] = value
    if has_others:
        node["allOf"] = [*node.get("allOf", []), {"anyOf": options}]


def _without_malformed(schema: object, placed: list[_Placed]) -> list[str]:
    """Remove keywords with values of a kind that they do not take. Returns the paths."""
    wholes = {each.base: each.whole for each in reversed(placed)}
    bases = {id(each.node): each.base for each in reversed(placed)}
    malformed: list[str] = []
    for path, node in subschemas("$", schema):
        for keyword in MAPS:
            held = node.get(keyword)
            if isinstance(held, dict):
                malformed += _open_malformed(f"{path}.{keyword}", cast("Any", held))
        wrong = [key for key, value in node.items() if not _is_well_formed(key, value)]
        malformed += [f"{path}.{key} ({_shown(node.pop(key))} {_fault(key)})" for key in wrong]
        reference = str(node.get("$ref"))
        pointer = f"#{reference.partition('#')[2]}"
        whole = wholes.get(_joined(bases.get(id(node), _BASE), reference))
        if whole and pointer.startswith("#/") and resolved(pointer, whole) is None:
            malformed.append(f"{path}.$ref ({node.pop('$ref')[:80]!r} leads nowhere)")
    return malformed


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
    found = [f"{path}.{name} ({_shown(schemas[name])} is no schema)" for name in wrong]
    schemas.update((name, {}) for name in wrong)
    return found


def _fault(keyword: str) -> str:
    return _NO_TYPE if keyword == "type" else "is no value for it"


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:80]


def _is_well_formed(keyword: str, value: object) -> bool:
    """Tell whether a keyword has a value of the kind that it takes."""
    match keyword:
        case "type":
            names = cast("list[object]", value) if isinstance(value, list) else [value]
            return bool(names) and all(name in _TYPES for name in names)
        case "enum":
            return isinstance(value, list) and bool(cast("list[object]", value))
        case "required":
            return _all_are(value, str)
        case "anyOf" | "oneOf" | "allOf":
            return bool(value) and _all_are(value, dict, bool)
        case "items" | "prefixItems":
            is_one = keyword == "items" and type(value) in (dict, bool)
            return is_one or _all_are(value, dict, bool)
        case "multipleOf":
            return _is_number(value) and cast("float", value) > 0
        case _ if keyword in BOUNDS:
            return _is_number(value)
        case _ if keyword in COUNTED:
            number = cast("float", value)
            return _is_number(value) and 0 <= number <= _MAX_COUNT and number % 1 == 0
        case _:
            return isinstance(value, _KINDS.get(keyword, object))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _all_are(value: object, *kinds: type) -> bool:
    """Tell whether a value is a list of nothing but these."""
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    return all(isinstance(item, kinds) for item in items)


_Fault = tuple[str, "dict[str, Any] | list[Any]", Any]
"""The path of a keyword with what it says, what holds it, and its name or value there."""


def _unsupported(placed: list[_Placed]) -> Iterator[_Fault]:
    """Yield all that cannot be held to."""
    names = frozenset(each.base for each in placed)
    scopes: NameScopes | None = None
    comparison = Comparison(len(placed))
    for path, node, whole, base in placed:
        for keyword in _REFUSED:
            if keyword in node:
                yield f"{path}.{keyword}", node, keyword
        form, reference = node.get("format"), node.get("$ref")
        if isinstance(form, str) and form not in _FORMATS:
            yield f"{path}.format ({form[:80]!r})", node, "format"
        if isinstance(reference, str) and _joined(base, reference) not in names:
            yield f"{path}.$ref ({reference[:80]!r} lies elsewhere)", node, "$ref"
        yield from _bad_patterns(path, node)
        yield from _bad_numbers(path, node, whole)
        if (pair := _overlapping(node, whole, comparison)) is not None:
            why = f"options {pair[0]} and {pair[1]} may hold at once"
            yield f"{path}.oneOf ({why}; anyOf takes such options)", node, "oneOf"
        named = node.get("patternProperties")
        if isinstance(named, dict):
            scopes = scopes or NameScopes([each.node for each in placed], is_bounded=True)
            for key in scopes.at_fault(node):
                if not _fault_of(key):
                    why = "is too complex to be told apart from other names"
                    place = f"{path}.patternProperties ({key[:80]!r} {why})"
                    yield place, cast("dict[str, Any]", named), key


def _bad_patterns(path: str, node: dict[str, Any]) -> Iterator[_Fault]:
    pattern, named = node.get("pattern"), node.get("patternProperties")
    if isinstance(pattern, str) and (why := _fault_of(pattern)):
        yield f"{path}.pattern ({pattern[:80]!r} {why})", node, "pattern"
    if isinstance(named, dict):
        patterns = cast("dict[str, Any]", named)
        for key in patterns:
            if why := _fault_of(key):
                yield f"{path}.patternProperties ({key[:80]!r} {why})", patterns, key


def _fault_of(pattern: str) -> str:
    """Return why a pattern cannot be held to, "" if it can."""
    try:
        whole_language(pattern)
    except PatternError as error:
        return str(error)
    return ""


def _bad_numbers(path: str, node: dict[str, Any], whole: dict[str, Any]) -> Iterator[_Fault]:
    rest = dict(node)
    while BOUNDS & rest.keys():
        try:
            held_bounds(rest, types_of(node, whole))
            break
        except LimitError as error:
            bound = rest.pop(error.keyword)
            yield f"{path}.{error.keyword} ({bound} {error})", node, error.keyword
    while COUNTS & rest.keys():
        try:
            held_counts(rest)
            break
        except LimitError as error:
            yield f"{path}.{error.keyword} ({error})", node, error.keyword
            del rest[error.keyword]
    if not is_held(node.get("const")):
        yield f"{path}.const (has a number beyond 18 digits)", node, "const"
    values = node.get("enum")
    if isinstance(values, list):
        listed = cast("list[object]", values)
        wrong = [value for value in listed if not is_held(value)]
        for value in wrong:
            place = f"{path}.enum ({str(value)[:80]} is beyond 18 digits)"
            yield (place, listed, value) if len(wrong) < len(listed) else (place, node, "enum")
            if len(wrong) == len(listed):
                break


def _overlapping(
    node: dict[str, Any], whole: dict[str, Any], comparison: Comparison
) -> tuple[int, int] | None:
    """Return the places of two options of `oneOf` that may both hold."""
    options = node.get("oneOf")
    if not isinstance(options, list):
        return None
    rest = {keyword: value for keyword, value in node.items() if keyword != "oneOf"}
    found = [{"allOf": [option, rest]} for option in cast("list[object]", options)]
    pair = comparison.overlapping(found[:_MAX_OPTIONS], whole)
    return pair or ((_MAX_OPTIONS - 1, _MAX_OPTIONS) if len(found) > _MAX_OPTIONS else None)


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
        waiting += [(path, each, whole, base) for path, each in reversed(inner_schemas(path, node))]
    return found
