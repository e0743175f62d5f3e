"""Grammars in GBNF, the notation of llama.cpp, written for the grammar library.

GBNF derives single characters. The library reads words first, the longest it can, so a rule of it
has one character per word, and a grammar without recursion is one regular expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from llguidance import LLMatcher

from quire.base.errors import RequestError
from quire.protocol.json_schema.patterns import (
    ANY,
    Chars,
    Node,
    alternatives,
    complement,
    concatenated,
    joined,
    repeated,
    written,
)

__all__ = ["compiled_gbnf", "is_gbnf"]

MAX_DEPTH = 60
"""Deepest nesting of groups, and of rules within rules that are written out."""
MAX_REPEATS = 10_000
MAX_REGEX_CHARS = 100_000
MAX_WRITTEN_CHARS = 1_000_000
"""Most characters of rules within rules, in all."""

_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_COUNTS = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}", re.ASCII)
_ESCAPE = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt"\\\[\]]))')
_TOKEN = re.compile(r"<\[\d+\]>|<[^\[\]<>\s\"]+>")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class _Word:
    """Another rule, or a token of the model between angles."""

    text: str
    is_token: bool
    line: int


@dataclass(frozen=True, slots=True)
class _Row:
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Row, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    body: _Part
    least: int
    most: int | None


_Part = Chars | _Word | _Row | _Choice | _Repeat


def is_gbnf(text: str) -> bool:
    """Return whether a text has rules in this notation."""
    return _RULE.search(text) is not None


def compiled_gbnf(text: str) -> str:
    """Return a grammar's text for the library. Raises RequestError with the line at fault."""
    rules = _Reader(text).read()
    regular = _Regular(rules)
    found = regular.of_rule("root", 0)
    regex = None if found is None else written(found)
    if regex is not None and len(regex) <= MAX_REGEX_CHARS:
        return LLMatcher.grammar_from_regex(regex)
    names = {name: f"r{place}" for place, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {_lark(rule, names)}" for name, rule in rules.items()]
    return LLMatcher.grammar_from_lark("\n".join(lines))


class _Reader:
    """Reads rules. A later one replaces an earlier one of its name, as in llama.cpp."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> dict[str, _Choice]:
        """Return the rules by name."""
        rules: dict[str, _Choice] = {}
        self._match(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME)
            if name is None:
                self._fail(f"{self._next()!r} stands where a rule's name should")
            self._match(_SPACE)
            if not self._take("::="):
                self._fail(f"the rule {name[0]!r} has no ::=")
            self._match(_SPACE_AND_LINES)
            rules[name[0]] = self._choice(0)
            if self._next() not in ("", "\r", "\n"):
                self._fail(f"{self._next()!r} stands where the rule {name[0]!r} should end")
            self._match(_SPACE_AND_LINES)
        if "root" not in rules:
            self._fail("there is no rule root")
        for rule in rules.values():
            for word in _words(rule):
                if not word.is_token and word.text not in rules:
                    self._fail(f"there is no rule {word.text!r}", word.line)
        return rules

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _fail(self, why: str, line: int | None = None) -> NoReturn:
        raise RequestError(
            f"structured_outputs.grammar is no grammar: line {line or self._line()}: {why}. "
            "Correct it."
        )

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) if is_there else 0
        return is_there

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found

    def _choice(self, depth: int) -> _Choice:
        if depth > MAX_DEPTH:
            self._fail(f"groups are nested deeper than {MAX_DEPTH}")
        options = [self._row(depth)]
        while self._is_bar(depth):
            self._match(_SPACE_AND_LINES)
            options.append(self._row(depth))
        return _Choice(tuple(options))

    def _is_bar(self, depth: int) -> bool:
        """Take a bar, which may begin the next line."""
        start = self._at
        if not depth:
            self._match(_SPACE_AND_LINES)
        if self._take("|"):
            return True
        self._at = start
        return False

    def _row(self, depth: int) -> _Row:
        space = _SPACE_AND_LINES if depth else _SPACE
        parts: list[_Part] = []
        while (sign := self._next()) and sign not in "|)\r\n":
            if sign in "*+?{":
                if not parts:
                    self._fail(f"{sign!r} repeats nothing")
                parts[-1] = self._repeated(parts[-1])
            elif sign == '"':
                parts.append(self._text_in_quotes())
            else:
                parts.append(self._part(sign, depth))
            self._match(space)
        return _Row(tuple(parts))

    def _part(self, sign: str, depth: int) -> _Part:
        if self._take("("):
            self._match(_SPACE_AND_LINES)
            inner = self._choice(depth + 1)
            if not self._take(")"):
                self._fail("a group has no end")
            return inner
        if self._take("["):
            return self._class()
        if self._take("."):
            return ANY
        line = self._line()
        if token := self._match(_TOKEN):
            return _Word(token[0], is_token=True, line=line)
        name = self._match(_NAME)
        if name is None:
            self._fail(f"{sign!r} has no meaning there")
        return _Word(name[0], is_token=False, line=line)

    def _repeated(self, part: _Part) -> _Part:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return _Repeat(part, *bounds)
        counts = self._match(_COUNTS)
        if counts is None or not (counts[1] or (counts[2] and counts[3])):
            self._fail("a repetition is written {m}, {m,}, {,n} or {m,n}")
        least = int(counts[1] or 0)
        most = (int(counts[3]) if counts[3] else None) if counts[2] else least
        if most is not None and most < least:
            self._fail(f"the repetition {counts[0]} ends below its start")
        if max(least, most or 0) > MAX_REPEATS:
            self._fail(f"the repetition {counts[0]} is above {MAX_REPEATS:,}")
        return _Repeat(part, least, most)

    def _character(self) -> int:
        """Read a character or an escape."""
        if self._next() == "":
            self._fail("the grammar ends within a text or a class")
        if self._next() != "\\":
            self._at += 1
            return ord(self._text[self._at - 1])
        found = self._match(_ESCAPE)
        if found is None:
            shown = self._text[self._at : self._at + 2]
            self._fail(
                f'{shown!r} is no escape; these are \\xNN \\uNNNN \\UNNNNNNNN and \\nrt"\\[]'
            )
        code = int(found[1] or found[2] or found[3] or "0", 16)
        code = ord(_LETTERS.get(found[4], found[4])) if found[4] else code
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            self._fail(f"{found[0]!r} is no character; write one beyond U+FFFF as \\UNNNNNNNN")
        return code

    def _text_in_quotes(self) -> _Part:
        self._at += 1
        codes: list[int] = []
        while not self._take('"'):
            codes.append(self._character())
        row = _Row(tuple(Chars(((code, code),)) for code in codes))
        return row.parts[0] if len(codes) == 1 else row

    def _class(self) -> Chars:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            low = high = self._character()
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._character()
            if high < low:
                self._fail("a range of characters ends below its start")
            ranges.append((low, high))
        if not ranges:
            self._fail("a class has no characters")
        return Chars(complement(joined(ranges)) if is_negated else joined(ranges))


def _words(part: _Part) -> list[_Word]:
    """Return all words of a rule."""
    match part:
        case _Word():
            return [part]
        case _Row(parts):
            return [word for each in parts for word in _words(each)]
        case _Choice(options):
            return [word for each in options for word in _words(each)]
        case _Repeat(body):
            return _words(body)
        case _:
            return []


class _Regular:
    """Writes out rules as regular expressions, as far as they have no recursion and no tokens."""

    def __init__(self, rules: dict[str, _Choice]) -> None:
        self._rules = rules
        self._known: dict[str, Node | None] = {}
        self._sizes: dict[str, int] = {}
        self._num_chars = 0

    def of_rule(self, name: str, depth: int) -> Node | None:
        """Return the language of a rule; None if it has no short regular expression."""
        if name not in self._known:
            self._known[name] = None  # while it is under way, which is recursion
            found = self._of(self._rules[name], depth) if depth <= MAX_DEPTH else None
            size = 0 if found is None else len(written(found))
            self._known[name] = found if size <= MAX_REGEX_CHARS else None
            self._sizes[name] = size
        self._num_chars += self._sizes.get(name, 0)
        return self._known[name] if self._num_chars <= MAX_WRITTEN_CHARS else None

    def _of(self, part: _Part, depth: int) -> Node | None:
        match part:
            case Chars():
                return part
            case _Word(text, is_token):
                return None if is_token else self.of_rule(text, depth + 1)
            case _Row(parts):
                found = self._all(parts, depth)
                return None if found is None else concatenated(*found)
            case _Choice(options):
                found = self._all(options, depth)
                return None if found is None else alternatives(found)
            case _Repeat(body, least, most):
                inner = self._of(body, depth)
                return None if inner is None else repeated(inner, least, most)

    def _all(self, parts: Sequence[_Part], depth: int) -> list[Node] | None:
        found = [self._of(part, depth) for part in parts]
        return None if None in found else [each for each in found if each is not None]


def _lark(part: _Part, names: dict[str, str]) -> str:
    """Write a part for the library's form of Lark."""
    match part:
        case Chars(((low, high),)) if low == high and chr(low).isprintable():
            return json.dumps(chr(low), ensure_ascii=False)
        case Chars():
            return f"/{written(part)}/"
        case _Word(text, is_token):
            return text if is_token else names[text]
        case _Row(parts):
            return " ".join(_lark(each, names) for each in parts) or '""'
        case _Choice(options):
            return f"({' | '.join(_lark(each, names) for each in options)})"
        case _Repeat(body, least, most):
            return f"({_lark(body, names)}){{{least},{'' if most is None else most}}}"
