"""The rules of a call's arguments, which are one JSON object or tagged values."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import unquote

from quire.base.errors import RequestError
from quire.protocol.json_schema import find_malformed, find_unknown_type, modernize
from quire.protocol.json_schema.patterns import PatternError, whole_regex
from quire.protocol.json_schema.types import ALL_TYPES, Schema, listed, node, resolved, types_of
from quire.text.dialect.keyword_rules import keywords_rule
from quire.text.dialect.rules import Rules, json_grammar, refusal_text
from quire.text.dialect.spec import ArgumentStyle, Dialect, ParameterSyntax
from quire.text.dialect.tools import Tool

__all__ = ["arguments_rule", "left_out"]

_Node = tuple[Schema, str]
_STRING = frozenset(("string",))
_DEFINITIONS = ("$defs", "definitions")
_UNLISTED = (
    "anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties",
    "propertyNames", "not", "if", "dependentRequired", "dependentSchemas",
)  # fmt: skip
"""Keywords of a whole object, which cannot be enforced on tagged values."""
_SCALARS = {
    "boolean": "(true|false)",
    "integer": "-?(0|[1-9][0-9]*)",
    "null": "null",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
}
_BEGINNINGS = {
    "array": r"\s*\[(?s:.*)",
    "boolean": r"\s*(true|false)(?s:.*)",
    "integer": r"\s*-?[0-9](?s:.*)",
    "null": r"\s*null(?s:.*)",
    "number": r"\s*-?[0-9](?s:.*)",
    "object": r"\s*\{(?s:.*)",
}
"""Texts that would be read as values of other types, so they are no texts where both are allowed:
single words, or all that begins in such a way."""
_BOUNDS = ("inimum", "aximum", "multipleOf")
MAX_COUNTED_CHARS = 1_500
"""Most characters of a text that are counted up to an end spelled by tokens of text, and fewest in
any case. The grammar library gives up at about 2,000, and its work grows with them."""
MAX_COUNTED_PAIRS = 500_000
"""Largest product of the most characters of a text and the fewest of another that a value may be
instead: the grammar library compares them character by character, and gives up at a million."""


def arguments_rule(rules: Rules, dialect: Dialect, tool: Tool, name: str, where: str) -> str:
    """Add the rule `name` for a tool's arguments, and return a reference to it. where: the field of
    the request with the schema. Raises RequestError for parts of a strict schema that are malformed
    or that the style cannot enforce."""
    if tool.is_strict:
        schema = copy.deepcopy(dict(tool.parameters))
        modernize(schema)
        if (place := find_unknown_type(schema) or find_malformed(schema)) is not None:
            raise RequestError(f"{where} has {place}. Correct it.")
    match dialect.style:
        case ArgumentStyle.RAW:
            assert dialect.parameter is not None
            return _Tagged(rules, dialect.parameter, tool, name, where).rule()
        case ArgumentStyle.PYTHON:
            return keywords_rule(rules, tool, name, where)
        case ArgumentStyle.JSON | ArgumentStyle.CHANNELS:
            grammar = json_grammar(tool.schema, is_strict=tool.is_strict)
            return rules.grammar(name, grammar, where)


def left_out(dialect: Dialect, tool: Tool) -> list[str]:
    """Return the paths of what a tool's schema says and the rule of its arguments does not hold to.
    Raises RequestError as `arguments_rule` does."""
    if dialect.style in (ArgumentStyle.JSON, ArgumentStyle.CHANNELS):
        return []
    rules = Rules(dialect.tokens)
    arguments_rule(rules, dialect, tool, "args", "")
    return list(dict.fromkeys(rules.left_out))


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
        self._without_strings = _WithoutStrings(tool.root)

    def rule(self) -> str:
        """Write all values, required and optional ones."""
        for keyword in _UNLISTED:
            if keyword in self._root:
                self._leave_out(f"$.{keyword}", "cannot be held with tagged values")
        others = self._tool.others
        if not self._tool.properties and others is not False:
            return self._any_values(others)
        required = [key for key in listed(self._root, "required") if isinstance(key, str)]
        names = dict.fromkeys([*self._tool.properties, *required])
        values = [
            f"({self._value(key, f'{self._name}_{i}')}){'' if key in required else '?'}"
            for i, key in enumerate(map(str, names))
            if self._can_write(key)
        ]
        self._rules.add(f"{self._name}: {' '.join(values) or self._rules.literal('')}")
        return self._name

    def _any_values(self, schema: object) -> str:
        self._rules.add("KEY: /[a-zA-Z_][a-zA-Z0-9_.-]{0,63}/")
        self._rules.add(f"{self._name}: ({self._typed('KEY', schema, f'{self._name}_any', '$')})*")
        return self._name

    def _can_write(self, key: str) -> bool:
        """Return False for a name that is left out, which a strict tool may not have."""
        if self._syntax.key_end.strip() not in key and "\n" not in key:
            return True
        self._leave_out(f"$.properties.{key[:80]}", "has a name that cannot be written")
        return False

    def _value(self, key: str, name: str) -> str:
        schema = self._tool.properties.get(key, True)
        return self._typed(json.dumps(key, ensure_ascii=False), schema, name, f"$.properties.{key}")

    def _typed(self, key: str, schema: object, name: str, path: str) -> str:
        """Write a value with its tags: a text unchanged, other values as JSON."""
        literal, syntax = self._rules.literal, self._syntax
        before = f"{literal(syntax.open)} {key}"
        middle, middle_json = literal(syntax.middle), literal(syntax.middle_json or syntax.middle)
        types = types_of(schema, self._root)
        beside = types - _STRING
        unbounded = _unbounded(schema)
        texts: list[str] = []
        lengths = self._lengths(list(_string_nodes(schema, self._root, path)))
        for i, (its, its_path, length) in enumerate(lengths):
            texts += self._texts(its, its_path, length, beside, unbounded, f"{name.upper()}_{i}")
        if texts and types == ALL_TYPES:
            return f"{before} {middle} ({' | '.join(texts)})"
        found = [f"{before} {middle} ({' | '.join(texts)})"] if texts else []
        if texts and not syntax.middle_json:
            scalars = unbounded & beside
            for each in sorted(scalars):
                value = self._rules.up_to(f"A_{each.upper()}", syntax.close, [_SCALARS[each]])
                found.append(f"{before} {middle} {value}")
            beside -= scalars
        if beside:
            narrowed = node(self._without_strings.of(schema))
            alone = {**narrowed, **_definitions(narrowed, self._root)}
            grammar = json_grammar(alone, is_strict=self._tool.is_strict)
            value = self._rules.grammar(name, grammar, f"{self._where} ({path})")
            found.append(f"{before} {middle_json} {value} {literal(syntax.close)}")
        text = " | ".join(found)
        self._rules.charge(len(text), self._where)
        return text

    def _texts(
        self,
        schema: Schema,
        path: str,
        length: tuple[int, int | None],
        beside: frozenset[str],
        unbounded: frozenset[str],
        name: str,
    ) -> list[str]:
        """Return alternatives for a text that one schema allows, up to its closing tag. length:
        fewest and most characters. beside: other types that the value may have. unbounded: see
        `_unbounded`."""
        rules, close = self._rules, self._syntax.close
        values = [schema["const"]] if "const" in schema else listed(schema, "enum")
        if values:
            texts = [value for value in values if isinstance(value, str)]
            return [f"{rules.plain(text)} {rules.literal(close)}" for text in texts]
        pattern = self._pattern(schema, path)
        is_any = beside | _STRING == ALL_TYPES or bool(self._syntax.middle_json)
        others = [] if is_any else _read_otherwise(beside, unbounded)
        if pattern is None and not others and length == (0, None):
            name = "VALUE"
        return [rules.up_to(name, close, ["(?s:.*)"], others, length, pattern)]

    def _lengths(self, nodes: list[_Node]) -> list[tuple[Schema, str, tuple[int, int | None]]]:
        """Return the alternatives of a value that are texts, with their lengths (`_length`)."""
        lengths = [self._length(*each) for each in nodes]
        is_in_text = isinstance(self._rules.tokens.split(self._syntax.close)[0], str)
        longest = sorted(most or 0 for _, most in lengths)[-2:]
        found: list[tuple[Schema, str, tuple[int, int | None]]] = []
        for (schema, path), (least, most) in zip(nodes, lengths, strict=True):
            others = longest[:-1] if most == longest[-1] else longest
            if is_in_text and others and least * others[-1] > MAX_COUNTED_PAIRS:
                why = f"stands beside a maxLength of {others[-1]:,} and cannot be held"
                self._leave_out(f"{path}.minLength", why)
                least = 0
            found.append((schema, path, (least, most)))
        return found

    def _length(self, schema: Schema, path: str) -> tuple[int, int | None]:
        """Return the fewest and most characters of a text, none for listed texts. What the grammar
        cannot count is left out, or refused if strict."""
        if "const" in schema or listed(schema, "enum"):
            return 0, None
        is_in_text = isinstance(self._rules.tokens.split(self._syntax.close)[0], str)
        found: dict[str, int] = {}
        for keyword in ("minLength", "maxLength"):
            number: object = schema.get(keyword)
            if isinstance(number, float) and number.is_integer():
                number = int(number)
            if not isinstance(number, int):
                if keyword in schema:
                    self._leave_out(f"{path}.{keyword}", "is no whole number and cannot be held")
            elif number > MAX_COUNTED_CHARS and (is_in_text or keyword == "minLength"):
                why = f"is above {MAX_COUNTED_CHARS:,} and cannot be held"
                self._leave_out(f"{path}.{keyword}", why)
            else:
                found[keyword] = number
        least, most = found.get("minLength", 0), found.get("maxLength")
        if most is not None and most < least:
            self._leave_out(f"{path}.maxLength", "is below its minLength and cannot be held")
            most = None
        return least, most

    def _leave_out(self, path: str, why: str) -> None:
        self._rules.leave_out(self._where, path, why, is_strict=self._tool.is_strict)

    def _pattern(self, schema: Schema, path: str) -> tuple[str, str] | None:
        """Return a regular expression that a text has to match, and the error if the grammar
        library refuses it."""
        why = "cannot be held in a tagged value"
        if "format" in schema:
            self._leave_out(f"{path}.format", why)
        if not isinstance(pattern := schema.get("pattern"), str):
            return None
        error = refusal_text(self._where, f"{path}.pattern", why) if self._tool.is_strict else ""
        try:
            return whole_regex(pattern), error
        except PatternError as fault:
            self._leave_out(f"{path}.pattern ({pattern[:80]!r} {fault})", why)
            return None


def _unbounded(schema: object) -> frozenset[str]:
    """Return the types whose values a regular expression tells from texts."""
    text = json.dumps(schema)
    if '"enum":' in text or '"const":' in text:
        return frozenset()
    is_bounded = any(bound in text for bound in _BOUNDS)
    return frozenset(("null", "boolean") if is_bounded else _SCALARS)


def _read_otherwise(types: frozenset[str], words: frozenset[str]) -> list[str]:
    """Return regular expressions of texts that would be read as values of other types."""
    found = [rf"\s*{_SCALARS[name]}\s*" for name in types & words]
    found += [_BEGINNINGS[name] for name in types - words]
    return sorted(set(found))


def _string_nodes(schema: object, root: Schema, path: str) -> Iterator[_Node]:
    """Yield the parts of a schema that allow texts, with their paths; each once."""
    known: dict[int, frozenset[str]] = {}
    seen = set[int]()
    waiting: list[tuple[object, str]] = [(schema, path)]
    while waiting:
        its, its_path = waiting.pop()
        if id(its) in seen or "string" not in types_of(its, root, known):
            continue
        seen.add(id(its))
        keywords = node(its)
        options = [
            (option, f"{its_path}.{keyword}[{i}]")
            for keyword in ("anyOf", "oneOf")
            for i, option in enumerate(listed(keywords, keyword))
        ]
        target = resolved(keywords.get("$ref"), root)
        if target is not None:
            options.append((target, f"{its_path}.$ref"))
        if not options:
            yield keywords, its_path
        waiting += reversed(options)


class _WithoutStrings:
    """Derives schemas of the values that are no texts. References are written out, so a schema may
    grow; one that grows beyond `MAX_PARTS` is left unchanged from there on."""

    MAX_PARTS = 2_000

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}
        self._num_parts = 0

    def of(self, schema: object, depth: int = 0) -> object:
        """Return the schema of the values that are no texts."""
        its, types = dict(node(schema)), self._types(schema)
        self._num_parts += 1
        if "string" not in types or depth > 10 or self._num_parts > self.MAX_PARTS:
            return schema
        target = resolved(its.get("$ref"), self._root)
        if target is not None:
            return self.of(target, depth + 1)
        for keyword in ("enum", "anyOf", "oneOf"):
            options: Sequence[Any] = listed(its, keyword)
            if keyword == "enum":
                kept = [each for each in options if not isinstance(each, str)]
            else:
                kept = [
                    self.of(each, depth + 1) for each in options if self._types(each) != _STRING
                ]
            if kept:
                its[keyword] = kept
        kinds = types - _STRING - ({"integer"} if "number" in types else set())
        return {**its, "type": sorted(kinds)}

    def _types(self, schema: object) -> frozenset[str]:
        return types_of(schema, self._root, self._known)


def _definitions(schema: Schema, root: Schema) -> dict[str, Any]:
    """Return the definitions of `root` that a part of it refers to, directly or through others.
    Where it refers to something by an anchor, that is all of them."""
    found: dict[str, dict[str, Any]] = {}
    waiting: list[object] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += cast("list[object]", part)
        if not isinstance(part, Mapping):
            continue
        keywords = cast("Schema", part)
        waiting += keywords.values()
        reference = keywords.get("$ref")
        if not isinstance(reference, str) or reference == "#":
            continue
        match unquote(reference).split("/"):
            case ["#", "$defs" | "definitions" as place, name, *_]:
                name = name.replace("~1", "/").replace("~0", "~")
                listed_there = node(root.get(place))
                if name in listed_there and name not in found.setdefault(place, {}):
                    found[place][name] = listed_there[name]
                    waiting.append(listed_there[name])
            case ["#", first, *_] if first not in _DEFINITIONS:
                pass
            case _:
                return {key: root[key] for key in _DEFINITIONS if key in root}
    return found
