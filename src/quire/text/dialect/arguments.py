"""Reads the arguments of a call, in each style, and passes them on as JSON text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from string import ascii_letters, digits, hexdigits

from quire.protocol.json_schema.types import json_types
from quire.text.dialect.reading import GrowingText, Waiting
from quire.text.dialect.spec import ArgumentStyle, Dialect
from quire.text.dialect.tools import Tool

__all__ = [
    "KEYWORD_CHARACTERS",
    "Emit",
    "all_before",
    "dumped",
    "read_arguments",
    "read_json_string",
    "read_json_value",
    "read_keywords",
    "refuse_constant",
    "typed",
]

Emit = Callable[[str], None]
"""Takes the next characters of the JSON text."""

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class _Nesting:
    """Tracks the nesting depth of a JSON text, and whether it is within a string."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_in_string = False
        self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Read the next characters. Returns the number of those up to the end of the value, None if
        it does not end in them."""
        place = 0
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            sign = (_INSIDE if self.is_in_string else _OUTSIDE).search(text, place)
            if sign is None:
                return None
            place = sign.end()
            if self.is_in_string:
                self._is_escaped = sign[0] == "\\"
                self.is_in_string = self._is_escaped
                continue
            self.is_in_string = sign[0] == '"'
            self.depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(sign[0], 0)
            if self.depth == 0 and not self.is_in_string:
                return place
        return None


def read_arguments(dialect: Dialect, tool: Tool, text: GrowingText, emit: Emit) -> Waiting:
    """Read from behind the name of a call up to its closing text. dialect: coded, like the text."""
    match dialect.style:
        case ArgumentStyle.RAW:
            yield from read_tagged(dialect, tool, text, emit)
        case ArgumentStyle.PYTHON:
            yield from read_keywords(text, emit)
        case ArgumentStyle.JSON | ArgumentStyle.CHANNELS:
            yield from text.skip_spaces()
            if text.waiting[0] == "{":
                yield from read_json_value(text, emit)
            else:
                emit("{}")


def read_tagged(dialect: Dialect, tool: Tool, text: GrowingText, emit: Emit) -> Waiting:
    """Read tagged values, each typed by its schema: `02134` is a text if the schema says so."""
    syntax = dialect.parameter
    assert syntax is not None
    key_end = syntax.key_end
    separator = "{"
    while (yield from text.is_at(syntax.open)):
        key = yield from all_before(text, key_end)
        types = tool.types_of(key)
        is_text = types == frozenset(("string",))
        if syntax.middle_json:
            is_text = yield from text.is_exactly_at(syntax.middle.removeprefix(key_end))
            if not is_text:
                types -= {"string"}
                yield from text.is_exactly_at(syntax.middle_json.removeprefix(key_end))
        emit(f"{separator}{dumped(key)}: ")
        separator = ", "
        if is_text:
            emit('"')
            yield from _pass_before(text, syntax.close, lambda said: emit(dumped(said)[1:-1]))
            emit('"')
        else:
            value = yield from all_before(text, syntax.close)
            emit(typed(value, types))
    emit("{}" if separator == "{" else "}")


def _pass_before(text: GrowingText, target: str, emit: Emit) -> Waiting:
    """Pass on the text before a target, which is read. If the text ends within the target, the
    partial target is no part of the value."""
    while True:
        passed, found = text.before(target)
        if passed:
            emit(passed)
        if found:
            return
        yield from text.more()


def all_before(text: GrowingText, target: str) -> Generator[None, None, str]:
    """Return the text before a target, which is read."""
    parts: list[str] = []
    yield from _pass_before(text, target, parts.append)
    return "".join(parts)


def dumped(value: object) -> str:
    """Return a value as JSON. Characters that stand for markers stay unchanged."""
    return json.dumps(value, ensure_ascii=False)


def typed(value: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value of one of `types`: unchanged if it is one that is no string,
    otherwise as a string."""
    try:
        found = json.loads(value, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return dumped(value)
    is_json = not isinstance(found, str) and json_types(found) & types
    return value.strip() if is_json or "string" not in types else dumped(value)


def refuse_constant(constant: str) -> object:
    """Refuse NaN and infinities, which Python alone reads as JSON."""
    raise ValueError(constant)


def read_json_value(text: GrowingText, emit: Emit) -> Waiting:
    """Read an object or a list unchanged."""
    nesting = _Nesting()
    while True:
        end = nesting.end_in(text.waiting)
        emit(text.take(len(text.waiting) if end is None else end))
        if end is not None:
            return
        yield from text.more()


def read_json_string(text: GrowingText, emit: Emit) -> Waiting:
    """Pass on the contents of a JSON string, from behind its first quote to behind its last."""
    while True:
        sign = _INSIDE.search(text.waiting)
        emit(text.take(len(text.waiting) if sign is None else sign.start()))
        if sign is None:
            yield from text.more()
            continue
        if text.take(1) == '"':
            return
        letter = yield from text.character()
        text.take(1)
        emit((yield from _unicode(text)) if letter == "u" else _ESCAPED.get(letter, letter))


def _unicode(text: GrowingText) -> Generator[None, None, str]:
    """Return the character of an escape whose `u` was read, together with the next escape if they
    are a surrogate pair."""
    unit = yield from _unit(text)
    if not 0xD800 <= unit < 0xDC00:
        return "\ufffd" if 0xDC00 <= unit < 0xE000 else chr(unit)
    if not (yield from text.is_exactly_at("\\u")):
        return "\ufffd"
    second = yield from _unit(text)
    if not 0xDC00 <= second < 0xE000:
        return "\ufffd"
    return chr(0x10000 + ((unit - 0xD800) << 10) + (second - 0xDC00))


def _unit(text: GrowingText, count: int = 4) -> Generator[None, None, int]:
    """Read hexadecimal digits, fewer than `count` before another character."""
    found = ""
    while len(found) < count and (yield from text.character()) in hexdigits:
        found += text.take(1)
    return int(found or "fffd", 16)


_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORD_CHARACTERS = ascii_letters + digits + "_.+-"
KEYWORD_CHARACTERS = ascii_letters + digits + "_-.$@/:"
"""Characters of names before `=`: schemas have names that Python has not."""
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_PYTHON_ESCAPES = {**_ESCAPED, "a": "\a", "v": "\v", "0": "\0", "\n": ""}


def read_keywords(text: GrowingText, emit: Emit) -> Waiting:
    """Read `name=literal` with commas, up to the parenthesis that closes the call."""
    separator = "{"
    while True:
        yield from text.skip_spaces()
        key = yield from text.run(KEYWORD_CHARACTERS)
        if not key or not (yield from text.is_at("=")):
            break
        emit(f"{separator}{dumped(key)}: ")
        separator = ", "
        yield from _python_value(text, emit)
        yield from text.is_at(",")
    emit("{}" if separator == "{" else "}")


def _python_value(text: GrowingText, emit: Emit) -> Waiting:
    """Read one literal, up to the comma or parenthesis behind it."""
    opened: list[str] = []
    while True:
        sign = yield from text.character()
        if sign in _WORD_CHARACTERS:
            word = yield from text.run(_WORD_CHARACTERS)
            emit(_WORDS.get(word, word))
            continue
        if not opened and sign in ",)":
            return
        text.take(1)
        if sign in "\"'":
            emit('"')
            yield from _python_string(text, sign, emit)
            emit('"')
        elif sign in "{[(":
            opened.append(_CLOSING[sign])
            emit("{" if sign == "{" else "[")
        elif opened and sign == opened[-1]:
            opened.pop()
            emit("}" if sign == "}" else "]")
        elif opened or not sign.isspace():
            emit(sign)


def _python_string(text: GrowingText, quote: str, emit: Emit) -> Waiting:
    """Read from behind the first quote to behind the last."""
    ends = re.compile(rf"[\\{quote}]")
    while True:
        sign = ends.search(text.waiting)
        said = text.take(len(text.waiting) if sign is None else sign.start())
        emit(dumped(said)[1:-1])
        if sign is None:
            yield from text.more()
        elif text.take(1) == quote:
            return
        else:
            emit(dumped((yield from _python_escape(text)))[1:-1])


def _python_escape(text: GrowingText) -> Generator[None, None, str]:
    letter = yield from text.character()
    text.take(1)
    if letter == "u":
        return (yield from _unicode(text))
    count = {"x": 2, "U": 8}.get(letter)
    if count is None:
        return _PYTHON_ESCAPES.get(letter, letter)
    point = yield from _unit(text, count)
    return chr(point) if point < 0xD800 or 0xE000 <= point < 0x110000 else "\ufffd"
