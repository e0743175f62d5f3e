"""Random JSON Schemas of what strict outputs are held to."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["FORMATS", "schemas"]

Schema = dict[str, Any]

FORMATS = (
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
_PATTERNS = ("^[a-c]{1,4}$", "^(yes|no)$", "[0-9]{2}", "^x", "^\\d{3}-\\w$")
_SCALARS = st.sampled_from(["a", "b c", 'q"\\', "é\n", 0, -3, 1.5, True, None])
_NAMES = st.sampled_from(["a", "b", "name", "c d", 'x"y', "ü"])


@st.composite
def _integers(draw: st.DrawFn) -> Schema:
    low = draw(st.integers(-50, 50))
    high = low + draw(st.integers(0, 200))
    kind = draw(st.sampled_from(["bounds", "exclusive", "multiple", "number", "any"]))
    return {
        "bounds": {"type": "integer", "minimum": low, "maximum": high},
        "exclusive": {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1},
        "multiple": {"type": "integer", "multipleOf": draw(st.integers(1, 12))},
        "number": {"type": "number", "minimum": low / 2, "maximum": high},
        "any": {"type": draw(st.sampled_from(["integer", "number"]))},
    }[kind]


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(0, 3))
    return draw(
        st.sampled_from(
            [
                {"type": "string", "minLength": least, "maxLength": least + 5},
                {"type": "string", "pattern": draw(st.sampled_from(_PATTERNS))},
                {"type": "string", "format": draw(st.sampled_from(FORMATS))},
            ]
        )
    )


_LEAVES = (
    _integers()
    | _strings()
    | st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"], "maxLength": 4}]
    )
    | st.builds(lambda values: {"enum": values}, st.lists(_SCALARS, min_size=1, max_size=4))
    | st.builds(lambda value: {"const": value}, _SCALARS)
)


def _objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    @st.composite
    def build(draw: st.DrawFn) -> Schema:
        properties = draw(st.dictionaries(_NAMES, inner, max_size=3))
        schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        if properties:
            schema["required"] = draw(
                st.lists(st.sampled_from(sorted(properties)), unique=True, max_size=3)
            )
        more = draw(st.sampled_from(["none", "pattern", "others", "count"]))
        if more == "pattern":
            schema["patternProperties"] = {"^z_[0-9]$": {"type": "boolean"}}
        elif more == "others":
            schema = {"type": "object", "additionalProperties": draw(inner), "maxProperties": 2}
        elif more == "count":
            schema = {"type": "object", "additionalProperties": draw(inner), "minProperties": 1}
            schema["maxProperties"] = 2
        return schema

    return build()


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    @st.composite
    def build(draw: st.DrawFn) -> Schema:
        least = draw(st.integers(0, 2))
        schema: Schema = {"type": "array", "minItems": least, "maxItems": least + 2}
        schema["items"] = draw(inner)
        if draw(st.booleans()):
            schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
        return schema

    return build()


def _combined(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    options = st.lists(inner, min_size=1, max_size=3)
    one_of = [{"type": "string", "maxLength": 3}, {"type": "boolean"}, {"type": "null"}]
    return (
        st.builds(lambda each: {"anyOf": each}, options)
        | st.builds(lambda one: {"allOf": [one]}, inner)
        | st.just({"allOf": [{"type": "integer", "minimum": -3}, {"maximum": 40}]})
        | st.just({"oneOf": one_of})
        | st.builds(lambda one: {"$defs": {"d": one}, "$ref": "#/$defs/d"}, _LEAVES)
    )


def _tree(depth: int) -> st.SearchStrategy[Schema]:
    if depth == 0:
        return _LEAVES
    inner = _tree(depth - 1)
    return _objects(inner) | _arrays(inner) | _combined(inner) | _LEAVES


_LIST: Schema = {
    "$defs": {
        "list": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/list"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/list",
}


_NAMED = st.sampled_from(
    [
        {"$defs": {"d": {"$anchor": "here", "type": "boolean"}}, "items": {"$ref": "#here"}},
        {
            "$id": "https://example.com/s",
            "$defs": {"d": {"const": 1}},
            "items": {"$ref": "#/$defs/d"},
        },
        {"$defs": {"a b/c": {"type": "null"}}, "items": {"$ref": "#/$defs/a%20b~1c"}},
    ]
).map(lambda schema: {**schema, "type": "array", "minItems": 1, "maxItems": 3})


def schemas() -> st.SearchStrategy[Schema]:
    """References stand at roots alone, where their definitions are."""
    trees = _objects(_tree_without_refs(2)) | _arrays(_tree_without_refs(1)) | _tree(0)
    return trees | st.just(_LIST) | _NAMED


def _tree_without_refs(depth: int) -> st.SearchStrategy[Schema]:
    return _tree(depth).filter(lambda schema: "$ref" not in str(schema))
