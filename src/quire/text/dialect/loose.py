"""Calls as models write them where no grammar holds them: each is read whole, and checked before it
counts as one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Generator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from quire.protocol.json_schema.types import listed
from quire.text.dialect.arguments import (
    all_before,
    dumped,
    read_json_string,
    read_json_value,
    read_keywords,
    refuse_constant,
    typed,
)
from quire.text.dialect.reading import CutError, GrowingText, Reading
from quire.text.dialect.spec import ArgumentStyle, Dialect, ParameterSyntax
from quire.text.dialect.tools import NAME_CHARACTERS, Tool

__all__ = [
    "FUNCTION",
    "Written",
    "checked_arguments",
    "function_call",
    "loosened",
    "named_arguments",
    "object_call",
    "rest_of_close",
]

_T = TypeVar("_T")
Maybe = Generator[None, None, _T | None]
"""A routine that returns what it read, or None if that is malformed."""

FUNCTION = "<function="
"""Beginning of a call that models of several families write beside the form of their own."""
_PARAMETER = ParameterSyntax("<parameter=", ">\n", "\n</parameter>\n")
_NAME_FIRST = re.compile(r'(.*)\{\s*"name"\s*:\s*"', re.DOTALL)
_FIRST_KEY = re.compile(r'\s*(?:\{\s*(?:"([a-z_]*)("?))?)?')
_KEYS = frozenset(("name", "arguments", "parameters", "type", "function", "id"))
_SPACES = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class Written(NamedTuple):
    """One call. arguments: JSON text of an object, coded as in the answer. id: empty without
    one."""

    name: str
    arguments: str
    id: str = ""


def loosened(dialect: Dialect) -> tuple[Dialect, bool]:
    """Return a dialect, and True if its calls are JSON objects: then all of each object is the
    call's, so that it may have its members in any order."""
    match = _NAME_FIRST.fullmatch(dialect.open)
    if dialect.style is not ArgumentStyle.JSON or match is None or dialect.id_open:
        return dialect, False
    _, _, close = dialect.close.partition("}")
    return replace(dialect, open=match[1], middle="", close=close), True


def object_call(text: GrowingText, tools: dict[str, Tool]) -> Maybe[Written]:
    """Read a call that is one JSON object."""
    yield from text.skip_spaces()
    if not (yield from _begins_call(text)):
        return None
    parts: list[str] = []
    yield from read_json_value(text, parts.append)
    found = _members("".join(parts))
    if found is not None and "name" not in found:
        found = {**found, **(_members(found.get("function", "")) or {})}
    if found is None:
        return None
    name = _loaded(found.get("name", ""))
    tool = tools.get(name) if isinstance(name, str) else None
    if tool is None:
        return None
    arguments = checked_arguments(found.get("arguments", found.get("parameters", "")), tool)
    given = _loaded(found.get("id", ""))
    if arguments is None:
        return None
    return Written(tool.name, arguments, given if isinstance(given, str) else "")


def _begins_call(text: GrowingText) -> Reading:
    """Return True at an object whose first key is one of a call. Nothing is read."""
    while True:
        waiting = text.waiting
        match = _FIRST_KEY.match(waiting)
        if match is not None and (match[2] or match.end() < len(waiting)):
            return bool(match[2]) and match[1] in _KEYS
        yield from text.more()


def function_call(
    dialect: Dialect, text: GrowingText, tools: dict[str, Tool], end: str
) -> Maybe[Written]:
    """Read a call from behind `FUNCTION` on, with tagged arguments or a JSON object. end: a closing
    text that may follow."""
    tool = tools.get((yield from text.run(NAME_CHARACTERS)))
    if tool is None or not (yield from text.is_at(">")):
        return None
    yield from text.skip_spaces()
    if (yield from text.character()) == "{":
        arguments = yield from _json(text, tool)
    else:
        is_own = dialect.parameter is not None and dialect.parameter.open == _PARAMETER.open
        syntax = dialect.parameter if is_own and dialect.parameter is not None else _PARAMETER
        arguments = yield from _tagged(syntax, tool, text)
    if arguments is None or not (yield from text.is_at("</function>")):
        return None
    text.forget()
    with contextlib.suppress(CutError):
        yield from text.is_at(end)
    return Written(tool.name, arguments)


def named_arguments(dialect: Dialect, tool: Tool, text: GrowingText) -> Maybe[str]:
    """Read arguments from behind a call's name, and the closing text where that alone ends them.
    dialect: coded, like the text."""
    if dialect.style is ArgumentStyle.RAW:
        assert dialect.parameter is not None
        arguments = yield from _tagged(dialect.parameter, tool, text)
        return arguments if (yield from text.is_at(_tag(dialect.close))) else None
    if dialect.style is ArgumentStyle.PYTHON:
        parts: list[str] = []
        yield from read_keywords(text, parts.append)
        arguments = checked_arguments("".join(parts), tool)
        return arguments if (yield from text.is_at(dialect.close)) else None
    return (yield from _json(text, tool))


def rest_of_close(dialect: Dialect) -> str:
    """The part of the closing text that `named_arguments` leaves."""
    if dialect.style is ArgumentStyle.RAW:
        return dialect.close.strip().removeprefix(_tag(dialect.close))
    return "" if dialect.style is ArgumentStyle.PYTHON else dialect.close


def _tag(close: str) -> str:
    """The part of a closing text that ends tagged arguments."""
    return close.strip().partition("\n")[0]


def _json(text: GrowingText, tool: Tool) -> Maybe[str]:
    yield from text.skip_spaces()
    parts: list[str] = []
    match text.waiting[0]:
        case "{":
            yield from read_json_value(text, parts.append)
        case '"':
            text.take(1)
            yield from read_json_string(text, parts.append)
        case _:
            yield from text.is_exactly_at("null")
    return checked_arguments("".join(parts), tool)


def _tagged(syntax: ParameterSyntax, tool: Tool, text: GrowingText) -> Maybe[str]:
    """Read tagged values, which may stand on lines of their own or not."""
    key_end, _, others = syntax.key_end.partition("\n")
    close = syntax.close.strip()
    found: list[str] = []
    while (yield from text.is_at(syntax.open.strip())):
        key = (yield from all_before(text, key_end)).strip()
        types = tool.types_of(key)
        is_text = types == frozenset(("string",))
        if syntax.middle_json:
            is_text = yield from text.is_exactly_at(syntax.middle.removeprefix(syntax.key_end))
            types = types if is_text else types - {"string"}
            if not is_text and not (
                yield from text.is_exactly_at(syntax.middle_json.removeprefix(syntax.key_end))
            ):
                return None
        elif not (yield from text.is_at(others.strip())):
            return None
        has_line = syntax.middle.endswith("\n") and (yield from text.is_exactly_at("\n"))
        value = yield from all_before(text, "\n" + close if has_line else close)
        found.append(f"{dumped(key)}: {dumped(value) if is_text else typed(value, types)}")
    return checked_arguments(f"{{{', '.join(found)}}}", tool)


def checked_arguments(written: str, tool: Tool) -> str | None:
    """Return the JSON text of an object: `written`, or that in its JSON string. Nothing at all is
    an empty object, for a tool that may do without arguments. None for anything else."""
    value = _loaded(written)
    if isinstance(value, dict):
        return written
    if isinstance(value, str) and value.strip():
        return value if isinstance(_loaded(value), dict) else None
    is_nothing = not written.strip() or value == "" or written.strip() == "null"
    return "{}" if is_nothing and not listed(tool.root, "required") else None


def _loaded(text: str) -> object:
    """The value of a JSON text; None if there is none."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def _members(text: str) -> dict[str, str] | None:
    """The JSON text of each member of an object; None if `text` is no object."""
    if not isinstance(_loaded(text), dict):
        return None
    found: dict[str, str] = {}
    place = _behind_spaces(text, _behind_spaces(text, 0) + 1)
    while text[place] != "}":
        key, place = _DECODER.raw_decode(text, place)
        start = _behind_spaces(text, _behind_spaces(text, place) + 1)
        _, end = _DECODER.raw_decode(text, start)
        found[key] = text[start:end]
        place = _behind_spaces(text, end)
        if text[place] == ",":
            place = _behind_spaces(text, place + 1)
    return found


def _behind_spaces(text: str, place: int) -> int:
    match = _SPACES.match(text, place)
    return place if match is None else match.end()
