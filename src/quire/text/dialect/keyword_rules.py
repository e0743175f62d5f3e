"""The rules of arguments in Python's form: `name=literal`, with commas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from quire.protocol.json_schema.types import ALL_TYPES, Schema, listed, node, resolved, types_of
from quire.text.dialect.arguments import KEYWORD_CHARACTERS
from quire.text.dialect.rules import Rules, json_grammar
from quire.text.dialect.tools import Tool

__all__ = ["keywords_rule"]

_COMMA = '", "'
_ANY = (
    'literal: TEXT_LITERAL | NUMBER | "True" | "False" | "None" | list_literal | dict_literal',
    r'TEXT_LITERAL: /"([^"\\\n\r\x00-\x1f]|\\["\\nrt]){0,2000}"/',
    r"NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?/",
    f'list_literal: "[" (literal ({_COMMA} literal)*)? "]"',
    f'dict_literal: "{{" (pair ({_COMMA} pair)*)? "}}"',
    'pair: TEXT_LITERAL ": " literal',
)
_STRUCTURE = frozenset(
    ("allOf", "patternProperties", "minProperties", "maxProperties", "prefixItems", "not", "if")
)


def keywords_rule(rules: Rules, tool: Tool, name: str, where: str) -> str:
    """Add the rule `name` for a tool's arguments, and return a reference to it. Raises RequestError
    for parts of a strict schema that cannot be enforced."""
    return _Keywords(rules, tool, name, where).rule()


class _Keywords:
    """Writes the arguments of one tool, in the order of its properties."""

    def __init__(self, rules: Rules, tool: Tool, name: str, where: str) -> None:
        self._rules = rules
        self._tool = tool
        self._root = tool.root
        self._name = name
        self._where = where
        self._references: dict[str, str] = {}
        self._num_rules = 0

    def rule(self) -> str:
        """Write all arguments."""
        properties = self._tool.properties
        if not properties and self._tool.others is not False:
            self._add_any()
            self._rules.add("KEY: /[a-zA-Z_][a-zA-Z0-9_]{0,63}/")
            one = 'KEY "=" literal'
            self._rules.add(f"{self._name}: ({one} ({_COMMA} {one})*)?")
            return self._name
        for key in properties:
            if not _is_keyword(key):
                self._leave_out(f"$.properties.{key[:80]}", "has a name that is no keyword")
        self._check(self._root, "$")
        pairs = [
            (f'"{key}=" {self._value(schema, f"$.properties.{key}")}', key)
            for key, schema in properties.items()
            if _is_keyword(key)
        ]
        return self._chain(self._name, pairs, listed(self._root, "required"))

    def _chain(
        self, name: str, pairs: Sequence[tuple[str, str]], required: Sequence[object]
    ) -> str:
        """Write pairs with commas between them, some of them optional. `name_i` is the rest from
        pair i on behind another pair, `name_i_first` without one before."""
        add = self._rules.add
        add(f"{name}_{len(pairs)}: {self._rules.plain('')}")
        add(f"{name}_{len(pairs)}_first: {self._rules.plain('')}")
        for i in reversed(range(len(pairs))):
            pair, key = pairs[i]
            add(f"{name}_{i}_pair: {pair}")
            rest, first = f"{name}_{i + 1}", f"{name}_{i + 1}_first"
            skip, skip_first = ("", "") if key in required else (f" | {rest}", f" | {first}")
            add(f"{name}_{i}: {_COMMA} {name}_{i}_pair {rest}{skip}")
            add(f"{name}_{i}_first: {name}_{i}_pair {rest}{skip_first}")
        return f"{name}_0_first"

    def _value(self, schema: object, path: str) -> str:
        """Return the rule for a literal of a schema."""
        its = node(schema)
        self._check(its, path)
        reference = its.get("$ref")
        if isinstance(reference, str):
            return self._referred(reference, path)
        values = [its["const"]] if "const" in its else listed(its, "enum")
        if values:
            return f"({' | '.join(self._rules.plain(_written(value)) for value in values)})"
        options = listed(its, "anyOf") or listed(its, "oneOf")
        if options:
            each = (self._value(option, f"{path}.anyOf[{i}]") for i, option in enumerate(options))
            return f"({' | '.join(each)})"
        types = types_of(schema, self._root)
        if types == ALL_TYPES or "allOf" in its:
            self._add_any()
            return "literal"
        if "number" in types:
            types -= {"integer"}
        return f"({' | '.join(self._of_type(kind, its, path) for kind in sorted(types))})"

    def _of_type(self, kind: str, schema: Schema, path: str) -> str:
        match kind:
            case "boolean":
                return '"True" | "False"'
            case "null":
                return '"None"'
            case "array":
                return self._list(schema, path)
            case "object":
                return self._dict(schema, path)
            case _:
                grammar = json_grammar({**schema, "type": kind}, is_strict=self._tool.is_strict)
                return self._rules.grammar(self._new_name(), grammar, f"{self._where} ({path})")

    def _list(self, schema: Schema, path: str) -> str:
        item = self._value(schema.get("items", True), f"{path}.items")
        least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if most == 0:
            return '"[]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        name = self._new_name()
        self._rules.add(f"{name}_item: {item}")
        self._rules.add(f"{name}: {name}_item ({_COMMA} {name}_item){more}")
        return f'"[" {name}{"" if least else "?"} "]"'

    def _dict(self, schema: Schema, path: str) -> str:
        properties = node(schema.get("properties"))
        if not properties:
            others = schema.get("additionalProperties", True)
            if others is False:
                return '"{}"'
            self._add_any()
            pair = f'TEXT_LITERAL ": " {self._value(others, f"{path}.additionalProperties")}'
            return f'"{{" ({pair} ({_COMMA} {pair})*)? "}}"'
        pairs = [
            (
                f"{self._rules.plain(_written(key) + ': ')} "
                f"{self._value(each, f'{path}.properties.{key}')}",
                key,
            )
            for key, each in properties.items()
        ]
        inner = self._chain(self._new_name(), pairs, listed(schema, "required"))
        return f'"{{" {inner} "}}"'

    def _referred(self, reference: str, path: str) -> str:
        """Return the rule of a reference. It is a rule of its own, so that a schema may refer to
        itself."""
        target = resolved(reference, self._root)
        if target is None:
            self._leave_out(f"{path}.$ref ({reference[:80]!r})", "leads nowhere")
            self._add_any()
            return "literal"
        if reference not in self._references:
            name = self._references[reference] = self._new_name()
            self._rules.add(f"{name}: {self._value(target, f'{path}.$ref')}")
        return self._references[reference]

    def _check(self, schema: Schema, path: str) -> None:
        for keyword in sorted(_STRUCTURE & schema.keys()):
            self._leave_out(f"{path}.{keyword}", "cannot be held in Python literals")

    def _leave_out(self, path: str, why: str) -> None:
        self._rules.leave_out(self._where, path, why, is_strict=self._tool.is_strict)

    def _add_any(self) -> None:
        for rule in _ANY:
            self._rules.add(rule)

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._name}_r{self._num_rules}"


def _is_keyword(key: str) -> bool:
    """Return True for a name that may stand before `=`; also one that is no name in Python."""
    return bool(key) and all(character in KEYWORD_CHARACTERS for character in key)


def _count(schema: Schema, keyword: str) -> int | None:
    """Return a number of items; None if the schema states none."""
    value = schema.get(keyword)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _written(value: object) -> str:
    """Return a value as a Python literal, with texts in double quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_written, cast('list[object]', value)))}]"
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return f"{{{', '.join(f'{_written(key)}: {_written(each)}' for key, each in items)}}}"
    if value is None or isinstance(value, bool):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
