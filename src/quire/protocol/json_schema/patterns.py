"""Regular expressions of JSON Schema: read as ECMA-262 has them, with code points as characters,
and written in the syntax that Rust's `regex` shares with it."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

__all__ = [
    "ANY", "Chars", "Choice", "Node", "PatternError", "Ranges", "Repeat", "Row", "alternatives",
    "complement", "concatenated", "is_nullable", "joined", "repeated", "whole_language",
    "whole_regex", "written",
]  # fmt: skip

MAX_DEPTH = 60
"""Deepest nesting of groups."""
MAX_CHARS = 50_000
"""Longest pattern, which takes some 0.3 s to read."""
MAX_CHARS_OF_ANY_CASE = 2_000
"""Longest pattern with the flag i, of which a class may stand for thousands of characters."""
MAX_ANCHORED = 40
"""Most parts of a row with anchors in them; the consequences of one are written for each."""
MAX_COUNT = 10_000
"""Largest number of repetitions; the grammar library takes no larger ones."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

Ranges = tuple[tuple[int, int], ...]


class PatternError(ValueError):
    """A pattern that cannot be held to, with the reason."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of `ranges` or of the Unicode properties `names` (`\\p{L}`), or one of no such
    kind if negated."""

    ranges: Ranges
    names: tuple[str, ...] = ()
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Parts in turn; without parts the empty text."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several; without options no text at all."""

    options: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """A body `least` to `most` times; None for no end."""

    body: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Anchor:
    """The start or the end of the text."""

    is_start: bool


Node = Chars | Row | Choice | Repeat | _Anchor

EMPTY, NEVER = Row(), Choice()


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in order, without overlaps and without surrogates, which no text has."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    low, high = _SURROGATES
    cut = [(a, min(b, low - 1)) for a, b in found] + [(max(a, high + 1), b) for a, b in found]
    return tuple(sorted((a, b) for a, b in cut if a <= b))


def complement(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    ends = [-1, *(high for _, high in ranges)]
    starts = [*(low for low, _ in ranges), _LAST + 1]
    return joined((a + 1, b - 1) for a, b in zip(ends, starts, strict=True) if a + 1 < b)


def _of(text: str) -> Ranges:
    return joined((ord(sign), ord(sign)) for sign in text)


ANY = Chars(joined([(0, _LAST)]))
_ALL = Repeat(ANY, 0, None)
_DIGITS: Ranges = ((0x30, 0x39),)
_WORDS = joined([*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACES = joined(
    [(9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
     (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
)  # fmt: skip
_NO_LINE_END = complement(_of("\n\r\u2028\u2029"))
_KINDS = {
    "d": _DIGITS, "D": complement(_DIGITS), "w": _WORDS, "W": complement(_WORDS),
    "s": _SPACES, "S": complement(_SPACES),
}  # fmt: skip
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "a": 7}
"""`\\a` has no meaning in ECMA-262, and this one everywhere else."""

_COUNTS = re.compile(r"\{(\d+)(?:(,)(\d*))?\}", re.ASCII)
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"([pP])(?:\{([A-Za-z0-9_]+(?:=[A-Za-z0-9_]+)?)\}|([A-Z]))")
_NAMED = re.compile(r"\?P?<[A-Za-z_$][\w$]*>")
_FLAGS = re.compile(r"\?([a-zA-Z]*)(?:-([a-zA-Z]*))?([:)])")


def concatenated(*parts: Node) -> Node:
    """Return the language of texts of these languages in turn."""
    flat: list[Node] = []
    for part in parts:
        flat += part.parts if isinstance(part, Row) else [part]
    if NEVER in flat:
        return NEVER
    return flat[0] if len(flat) == 1 else Row(tuple(flat))


def alternatives(options: Iterable[Node]) -> Node:
    """Return the language of the texts of any of these."""
    flat: dict[Node, None] = {}
    for option in options:
        flat.update(dict.fromkeys(option.options if isinstance(option, Choice) else [option]))
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def repeated(body: Node, least: int, most: int | None) -> Node:
    """Return the language of repetitions."""
    if most == 0 or body == EMPTY or (body == NEVER and least == 0):
        return EMPTY
    if body == NEVER or (least, most) == (1, 1):
        return body
    return Repeat(body, least, most)


class _Reader:
    """Reads a pattern. Where ECMA-262 has two syntaxes, with and without the flag `u`, it reads
    what either of them allows."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._flags = frozenset[str]()

    def read(self) -> Node:
        """Return the whole pattern. Raises PatternError."""
        if len(self._text) > MAX_CHARS:
            self._fail(f"is longer than {MAX_CHARS:,} characters")
        found = self._choice(0)
        if self._at < len(self._text):
            self._fail("ends a group that did not begin")
        return found

    def _fail(self, why: str) -> NoReturn:
        raise PatternError(why)

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

    def _choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self._fail("is nested too deeply")
        flags = self._flags
        options = [self._row(depth)]
        while self._take("|"):
            options.append(self._row(depth))
        self._flags = flags
        return alternatives(options)

    def _row(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._next() not in ("", "|", ")"):
            if self._match(_COUNTS) or self._next() in ("*", "+", "?"):
                self._fail("repeats nothing")
            atom = self._atom(depth)
            parts.append(self._quantified(atom))
        return concatenated(*parts)

    def _quantified(self, atom: Node) -> Node:
        bounds: tuple[int, int | None] | None = None
        for sign, its in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if bounds is None and self._take(sign):
                bounds = its
        if bounds is None and (counts := self._match(_COUNTS)):
            least = int(counts[1])
            bounds = least, (int(counts[3]) if counts[3] else None) if counts[2] else least
        if bounds is None:
            return atom
        self._take("?")  # a lazy one matches the same texts
        least, most = bounds
        if isinstance(atom, _Anchor):
            self._fail("repeats nothing")
        if most is not None and most < least:
            self._fail("has a repetition whose end is below its start")
        if max(least, most or 0) > MAX_COUNT:
            self._fail(f"repeats more than {MAX_COUNT:,} times")
        return repeated(atom, least, most)

    def _atom(self, depth: int) -> Node:
        if self._take("("):
            return self._group(depth)
        if self._take("["):
            return self._class()
        if self._take("\\"):
            return self._escape()
        sign = self._next()
        self._at += 1
        if sign in "^$":
            return _Anchor(sign == "^")
        if sign == ".":
            return ANY if "s" in self._flags else Chars(_NO_LINE_END)
        return self._chars(_of(sign) or self._fail("has half of a surrogate pair"))

    def _chars(self, ranges: Ranges, names: tuple[str, ...] = (), *, negated: bool = False) -> Node:
        if "i" in self._flags:
            if names:
                self._fail("has \\p beside the flag i")
            ranges = _any_case(ranges)
        if names:
            return Chars(ranges, names, negated)
        ranges = complement(ranges) if negated else ranges
        return Chars(ranges) if ranges else NEVER

    def _group(self, depth: int) -> Node:
        for sign in ("?=", "?!", "?<=", "?<!"):
            if self._take(sign):
                self._fail("looks around or back")
        flags = self._flags
        if self._next() == "?" and not self._match(_NAMED):
            found = self._match(_FLAGS)
            if found is None:
                self._fail("has a group of an unknown kind")
            on, off = frozenset(found[1]), frozenset(found[2] or "")
            if (on | off) - frozenset("is"):
                self._fail(f"has the flags {found[0]!r}")
            if "i" in on and len(self._text) > MAX_CHARS_OF_ANY_CASE:
                self._fail(f"has the flag i and more than {MAX_CHARS_OF_ANY_CASE:,} characters")
            if found[3] == ")":
                self._flags = flags = (flags | on) - off
                return EMPTY
            self._flags = (flags | on) - off
        inner = self._choice(depth + 1)
        self._flags = flags
        if not self._take(")"):
            self._fail("has a group without an end")
        return inner

    def _escape(self) -> Node:
        sign = self._next()
        if sign in ("b", "B") or (sign.isdecimal() and sign != "0"):
            self._fail("looks around or back")
        if self._take("k<"):
            self._fail("looks around or back")
        if sign in ("A", "z"):  # no meaning in ECMA-262, and these in all other dialects
            self._at += 1
            return _Anchor(sign == "A")
        ranges, names, is_negated = self._escaped()
        return self._chars(ranges, names, negated=is_negated)

    def _escaped(self, *, in_class: bool = False) -> tuple[Ranges, tuple[str, ...], bool]:
        """Read what follows a backslash: characters, properties, and if these are negated."""
        sign = self._next()
        if sign == "":
            self._fail("ends with a backslash")
        if sign in _KINDS:
            self._at += 1
            return _KINDS[sign], (), False
        if found := self._match(_PROPERTY):
            return (), (found[2] or found[3],), found[1] == "P"
        code = self._code(in_class=in_class)
        return ((code, code),), (), False

    def _code(self, *, in_class: bool) -> int:
        """Read what follows a backslash as one character."""
        if found := self._match(_CODE):
            code = int(found[1] or found[2] or found[3], 16)
            low = self._match(_LOW_HALF) if 0xD800 <= code < 0xDC00 and found[2] else None
            if low is not None:
                return 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
            if _SURROGATES[0] <= code <= _SURROGATES[1]:
                self._fail("has half of a surrogate pair")
            if code > _LAST:
                self._fail(f"has {found[0]!r}, which is no character")
            return code
        if found := self._match(re.compile("[0-7]{1,3}" if in_class else "0[0-7]{0,2}")):
            return int(found[0], 8) & 0xFF
        if found := self._match(re.compile("c([a-zA-Z0-9_])" if in_class else "c([a-zA-Z])")):
            return ord(found[1]) & 31
        sign = self._next()
        self._at += 1
        if sign == "b" and in_class:
            return 8
        if sign in _CONTROLS:
            return _CONTROLS[sign]
        if sign == "c":
            self._at -= 1
            return 0x5C
        if sign.isascii() and sign.isalnum() and sign not in "xuk":
            self._fail(f"has '\\{sign}', which is no escape of ECMA-262")
        return ord(sign)

    def _class(self) -> Node:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        names: list[str] = []
        while not self._take("]"):
            first = self._member(names)
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member(names)
                if _is_one(first) and _is_one(last):
                    low, high = first[0][0], last[0][0]
                    if high < low:
                        self._fail("has a range of characters whose end is below its start")
                    ranges.append((low, high))
                    continue
                ranges += [*last, (0x2D, 0x2D)]
            ranges += first
        return self._chars(joined(ranges), tuple(names), negated=is_negated)

    def _member(self, names: list[str]) -> Ranges:
        """Read one member of a class; a property goes to `names`, and is no range."""
        if self._at >= len(self._text):
            self._fail("has a class without an end")
        if not self._take("\\"):
            self._at += 1
            code = ord(self._text[self._at - 1])
            return ((code, code),)
        ranges, found, is_negated = self._escaped(in_class=True)
        names += [f"^{name}" if is_negated else name for name in found]
        return ranges


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


@functools.cache
def _cases() -> dict[int, tuple[int, ...]]:
    """Characters that differ in case alone, by character."""
    by_fold: dict[str, list[int]] = {}
    for code in range(0x1E944):
        fold = chr(code).casefold()
        if len(fold) == 1:
            by_fold.setdefault(fold, []).append(code)
    found = {code: tuple(codes) for codes in by_fold.values() if codes[1:] for code in codes}
    return dict(sorted(found.items()))


@functools.lru_cache(maxsize=1024)
def _any_case(ranges: Ranges) -> Ranges:
    found, cases = list(ranges), _cases()
    codes = list(cases)  # in order
    for low, high in ranges:
        for code in codes[bisect.bisect_left(codes, low) : bisect.bisect_right(codes, high)]:
            found += [(each, each) for each in cases[code] if not low <= each <= high]
    return joined(found)


def is_nullable(node: Node) -> bool:
    """Return whether a language has the empty text."""
    match node:
        case Row(parts):
            return all(map(is_nullable, parts))
        case Choice(options):
            return any(map(is_nullable, options))
        case Repeat(body, least, _):
            return least == 0 or is_nullable(body)
        case _:
            return False


_Edges = Mapping[tuple[bool, bool], Node]
"""A language in four parts: texts that must stand at the start, at the end, at both, at none."""

_NO_EDGES: _Edges = {(False, False): EMPTY}


def _edges(node: Node, *, is_repeated: bool = False) -> _Edges:
    """Return the parts of a language with anchors in it. is_repeated: it is repeated."""
    if not _has_anchor(node):
        return {(False, False): node}
    match node:
        case _Anchor(is_start):
            return {(is_start, not is_start): EMPTY}
        case Row(parts):
            if sum(map(_has_anchor, parts)) > MAX_ANCHORED:
                raise PatternError("has too many ^ and $")
            found, plain = _NO_EDGES, list[Node]()
            for part in parts:
                if not _has_anchor(part):
                    plain.append(part)
                    continue
                found = _edges_of_row(found, {(False, False): concatenated(*plain)})
                found = _edges_of_row(found, _edges(part, is_repeated=is_repeated))
                plain = []
            return _edges_of_row(found, {(False, False): concatenated(*plain)})
        case Choice(options):
            return _edges_of_choice(_edges(each, is_repeated=is_repeated) for each in options)
        case Repeat(body, least, most):
            if is_repeated or least > 1 or most not in (1, None):
                raise PatternError("repeats ^ or $")
            inner = _edges(body, is_repeated=True)
            rows: list[_Edges] = [inner, _NO_EDGES] if least == 0 else [inner]
            if most is None:
                middle = repeated(inner.get((False, False), NEVER), 0, None)
                rows.append(_edges_of_row(_edges_of_row(inner, {(False, False): middle}), inner))
            return _edges_of_choice(rows)
        case _:
            raise AssertionError(node)


def _has_anchor(node: Node) -> bool:
    match node:
        case Row(parts) | Choice(parts):
            return any(map(_has_anchor, parts))
        case Repeat(body):
            return _has_anchor(body)
        case _:
            return isinstance(node, _Anchor)


def _edges_of_row(first: _Edges, second: _Edges) -> _Edges:
    found: list[_Edges] = []
    for (at_start, ends), one in first.items():
        for (starts, at_end), other in second.items():
            if (starts and not is_nullable(one)) or (ends and not is_nullable(other)):
                continue
            text = concatenated(EMPTY if starts else one, EMPTY if ends else other)
            found.append({(at_start or starts, at_end or ends): text})
    return _edges_of_choice(found)


def _edges_of_choice(options: Iterable[_Edges]) -> _Edges:
    found: dict[tuple[bool, bool], list[Node]] = {}
    for option in options:
        for key, node in option.items():
            found.setdefault(key, []).append(node)
    return {key: alternatives(nodes) for key, nodes in found.items()}


@functools.lru_cache(maxsize=1024)
def whole_language(pattern: str) -> Node:
    """Return the texts in which a pattern is found. Raises PatternError for one that no grammar can
    hold to, or that is found in no text."""
    edges = _edges(_Reader(pattern).read())
    found = alternatives(
        concatenated(EMPTY if starts else _ALL, node, EMPTY if ends else _ALL)
        for (starts, ends), node in edges.items()
    )
    if found == NEVER:
        raise PatternError("is found in no text")
    return found


def whole_regex(pattern: str) -> str:
    """Return a regular expression of the whole texts in which a pattern is found. It has no anchor,
    and means the same in ECMA-262 and in Rust. Raises PatternError as `whole_language` does."""
    return written(whole_language(pattern))


def written(node: Node) -> str:
    """Write a language as a regular expression."""
    match node:
        case Row(parts):
            return "".join(_in_row(part) for part in parts)
        case Choice(options):
            return "|".join(map(written, options)) or _class_of(ANY.ranges, (), is_negated=True)
        case Repeat(body, least, most):
            return f"{_atomic(body)}{_counts(least, most)}"
        case Chars(ranges, names, is_negated):
            if names or is_negated or not _is_one(ranges):
                return _class_of(ranges, names, is_negated=is_negated)
            return _character(ranges[0][0])
        case _:
            raise AssertionError(node)


def _counts(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _in_row(node: Node) -> str:
    return f"(?:{written(node)})" if isinstance(node, Choice) else written(node)


def _atomic(node: Node) -> str:
    return written(node) if isinstance(node, Chars) else f"(?:{written(node)})"


def _class_of(ranges: Ranges, names: Sequence[str], *, is_negated: bool) -> str:
    members = [
        "-".join(_character(code, in_class=True) for code in dict.fromkeys(pair)) for pair in ranges
    ]
    members += [f"\\P{{{name[1:]}}}" if name[0] == "^" else f"\\p{{{name}}}" for name in names]
    return f"[{'^' if is_negated else ''}{''.join(members)}]"


def _character(code: int, *, in_class: bool = False) -> str:
    """Write a character so that it has no meaning anywhere."""
    sign = chr(code)
    if sign in "\\.+*?()|[]{}^$/" or (in_class and sign == "-"):
        return "\\" + sign
    if sign in "&~#" or not sign.isprintable():
        return f"\\u{{{code:x}}}" if code > 0xFF else f"\\x{code:02x}"
    return sign
