"""The rules of a call's arguments: as one JSON object, or as tagged values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from quire.dialect.keyword_rules import keywords_rule
from quire.dialect.rules import Rules, json_grammar, refuse
from quire.dialect.schema_types import ALL_TYPES, Schema, listed, node, resolved, types_of
from quire.dialect.spec import ArgumentStyle, Dialect, ParameterSyntax
from quire.dialect.tools import Tool

__all__ = ["arguments_rule"]

_Node = tuple[Schema, str]
_STRING = frozenset(("string",))
_UNLISTED = (
    "anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties",
    "propertyNames", "not", "if", "dependentRequired", "dependentSchemas",
)  # fmt: skip
"""Keywords of a whole object, to which tagged values cannot be held."""
_READS_AS = {
    "number": r"\s*-?[0-9][0-9.eE+-]*\s*",
    "boolean": r"\s*(true|false)\s*",
    "null": r"\s*null\s*",
    "array": r"\s*\[(?s:.*)",
    "object": r"\s*\{(?s:.*)",
}
"""What would be read as a value of another type, so it is no text where both may stand."""


def arguments_rule(rules: Rules, dialect: Dialect, tool: Tool, name: str, where: str) -> str:
    """Add the rule `name` of a tool's arguments, and return what refers to it. where: the field of
    the request that states the schema. RequestError for what the style cannot hold of a strict
    schema."""
    match dialect.style:
        case ArgumentStyle.RAW:
            assert dialect.parameter is not None
            return _Tagged(rules, dialect.parameter, tool, name, where).rule()
        case ArgumentStyle.PYTHON:
            return keywords_rule(rules, tool, name, where)
        case ArgumentStyle.JSON | ArgumentStyle.CHANNELS:
            grammar = json_grammar(tool.schema, is_strict=tool.is_strict)
            return rules.grammar(name, grammar, where)


class _Tagged:
    """Writes the tagged values of one tool, in the order of its properties."""

    def __init__(
        self, rules: Rules, syntax: ParameterSyntax, tool: Tool, name: str, where: str
    ) -> None:
        self._rules = rules
        self._syntax = syntax
        self._tool = tool
        self._name = name
        self._where = where
        self._root = tool.root

    def rule(self) -> str:
        """All values: those that are required, others at will."""
        if self._tool.is_strict:
            for keyword in _UNLISTED:
                if keyword in self._root:
                    refuse(self._where, f"$.{keyword}", "cannot be held with tagged values")
        others = self._tool.others
        if not self._tool.properties and others is not False:
            return self._any_values(others)
        required = listed(self._root, "required")
        names = dict.fromkeys([*self._tool.properties, *required])
        values = [
            f"({self._value(str(key), f'{self._name}_{i}')}){'' if key in required else '?'}"
            for i, key in enumerate(names)
        ]
        self._rules.add(f"{self._name}: {' '.join(values) or self._rules.literal('')}")
        return self._name

    def _any_values(self, schema: object) -> str:
        self._rules.add("KEY: /[a-zA-Z_][a-zA-Z0-9_.-]{0,63}/")
        self._rules.add(f"{self._name}: ({self._typed('KEY', schema, f'{self._name}_any', '$')})*")
        return self._name

    def _value(self, key: str, name: str) -> str:
        if self._syntax.key_end.strip() in key or "\n" in key:
            refuse(self._where, f"$.properties.{key[:80]}", "has a name that cannot be written")
        schema = self._tool.properties.get(key, True)
        return self._typed(json.dumps(key, ensure_ascii=False), schema, name, f"$.properties.{key}")

    def _typed(self, key: str, schema: object, name: str, path: str) -> str:
        """A value with its tags: a text as it is, or JSON."""
        literal, syntax = self._rules.literal, self._syntax
        before = f"{literal(syntax.open)} {key}"
        types = types_of(schema, self._root)
        middle = literal(syntax.middle)
        texts: list[str] = []
        for i, each in enumerate(_string_nodes(schema, self._root, path)):
            texts += self._texts(*each, types - _STRING, f"{name.upper()}_{i}")
        found = [f"{before} {middle} ({' | '.join(texts)})"] if texts else []
        if types - _STRING and types != ALL_TYPES:
            narrowed = {**node(_without_strings(schema, self._root)), **_definitions(self._root)}
            grammar = json_grammar(narrowed, is_strict=self._tool.is_strict)
            value = self._rules.grammar(name, grammar, f"{self._where} ({path})")
            middle = literal(syntax.middle_json or syntax.middle)
            found.append(f"{before} {middle} {value} {literal(syntax.close)}")
        return " | ".join(found)

    def _texts(self, schema: Schema, path: str, beside: frozenset[str], name: str) -> list[str]:
        """Alternatives of a text that one schema allows, up to its closing tag. beside: other types
        that the value may have."""
        rules, close = self._rules, self._syntax.close
        values = [schema["const"]] if "const" in schema else listed(schema, "enum")
        if values:
            texts = [value for value in values if isinstance(value, str)]
            return [f"{rules.plain(text)} {rules.literal(close)}" for text in texts]
        bodies = self._bodies(schema, path)
        is_any = beside | _STRING == ALL_TYPES or bool(self._syntax.middle_json)
        others = [] if is_any else _read_otherwise(beside)
        if len(bodies) == 1 and not others:
            name = "VALUE"
        return [rules.up_to(name, close, bodies, others)]

    def _bodies(self, schema: Schema, path: str) -> list[str]:
        """Regular expressions that a text has to match."""
        bodies = ["(?s:.*)"]
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            bodies.append(f"(?s:.{{{least},{most}}})")
        if isinstance(pattern := schema.get("pattern"), str):
            body = _of_pattern(pattern)
            if body is not None:
                bodies.append(body)
            elif self._tool.is_strict:
                refuse(self._where, f"{path}.pattern", "cannot be held in a tagged value")
        if "format" in schema and self._tool.is_strict:
            refuse(self._where, f"{path}.format", "cannot be held in a tagged value")
        return bodies


def _read_otherwise(types: frozenset[str]) -> list[str]:
    """Regular expressions of texts that would be read as values of other types."""
    names = {"number" if name == "integer" else name for name in types}
    return [_READS_AS[name] for name in sorted(names)]


_ANCHOR = re.compile(r"(?<!\\)[\^$]")


def _of_pattern(pattern: str) -> str | None:
    """A pattern that may match anywhere, as one of the whole text; None if it cannot be."""
    inner = pattern.removeprefix("^")
    before = "" if inner != pattern else "(?s:.*)"
    is_ended = inner.endswith("$") and not inner.endswith("\\$")
    inner, after = (inner[:-1], "") if is_ended else (inner, "(?s:.*)")
    outside = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "", inner)
    if _ANCHOR.search(outside) or "(?=" in inner or "(?!" in inner or "(?<" in inner:
        return None
    if "|" in re.sub(r"\([^()]*\)", "", outside) and (before != after):
        return None
    escaped = re.sub(r"(\\.)|/", lambda sign: sign[1] or "\\/", inner).replace("\n", "\\n")
    return f"{before}({escaped}){after}"


def _string_nodes(schema: object, root: Schema, path: str, depth: int = 0) -> Iterator[_Node]:
    """The parts of a schema that allow texts, with their paths."""
    its = node(schema)
    if "string" not in types_of(schema, root) or depth > 10:
        return
    options: list[tuple[object, str]] = []
    for keyword in ("anyOf", "oneOf"):
        options += [(each, f"{path}.{keyword}[{i}]") for i, each in enumerate(listed(its, keyword))]
    target = resolved(its.get("$ref"), root)
    if target is not None:
        options.append((target, f"{path}.$ref"))
    if not options:
        yield its, path
    for option, its_path in options:
        yield from _string_nodes(option, root, its_path, depth + 1)


def _without_strings(schema: object, root: Schema, depth: int = 0) -> object:
    """The schema of the values that are no texts."""
    its = dict(node(schema))
    types = types_of(schema, root)
    if "string" not in types or depth > 10:
        return schema
    target = resolved(its.get("$ref"), root)
    if target is not None:
        return _without_strings(target, root, depth + 1)
    for keyword in ("enum", "anyOf", "oneOf"):
        options: Sequence[Any] = listed(its, keyword)
        if keyword == "enum":
            kept = [each for each in options if not isinstance(each, str)]
        else:
            kept = [
                _without_strings(each, root, depth + 1)
                for each in options
                if types_of(each, root) != _STRING
            ]
        if kept:
            its[keyword] = kept
    kinds = types - _STRING - ({"integer"} if "number" in types else set())
    return {**its, "type": sorted(kinds)}


def _definitions(root: Schema) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
