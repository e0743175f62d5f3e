"""Splits the names that several patterns match, or none of them, into languages apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from quire.protocol.json_schema.patterns import (
    ANY,
    Chars,
    Choice,
    Node,
    PatternError,
    Ranges,
    Repeat,
    Row,
    alternatives,
    concatenated,
    is_nullable,
    joined,
    repeated,
    whole_language,
    whole_regex,
    written,
)

__all__ = ["ANY_NAME", "Cells", "NameScopes", "matches", "name_cells"]

MAX_PATTERNS = 32
MAX_STATES = 400
MAX_CHARS = 20_000
"""Most characters of the regular expression of one cell."""
MAX_WORK = 20_000
"""Most steps of work for one automaton, which take some 0.1 s."""
MAX_SCHEMA_WORK = 30_000
"""Steps of work for one schema after which no other automaton is made."""
MAX_SETS = 64
"""Most sets of patterns of one schema."""

_SIGNS: Ranges = joined([(0x20, 0x7E), (0x80, 0x10FFFF)])
"""Characters of names that no schema mentions. A control character would have several spellings."""
ANY_NAME = f"^{written(Repeat(Chars(_SIGNS), 0, None))}$"

_NEVER, _EMPTY, _ALL = Choice(), Row(), Repeat(ANY, 0, None)
_State = tuple[Node, ...]
_Way = tuple[Node, int]
"""A language between two states, with about as many characters as it takes to write."""
_PREFIXES = (0, 12, 6, 3, 1)
"""Characters by which names are kept away, all of them first."""

Cells = Sequence[tuple[frozenset[int], bool, str]]
"""Anchored patterns without a name in common: the places of the given patterns that match all names
of a cell, whether these are among (or begin like) the names to keep apart, and the pattern."""


def name_cells(
    patterns: tuple[str, ...],
    named: tuple[str, ...] = (),
    *,
    is_exact: bool = True,
    work: _Work | None = None,
) -> Cells:
    """Return the cells of some patterns, each split by the names `named`. If it is not exact, only
    the names that no pattern matches are split, and those that begin like `named` may be among
    them. work: counts that of the last try. Raises PatternError if it takes too much."""
    work = work or _Work()
    if not patterns and not named:
        return [(frozenset(), False, ANY_NAME)]
    if len(patterns) > MAX_PATTERNS:
        raise PatternError("is one of too many patterns")
    languages = [whole_language(pattern) for pattern in patterns]
    for length in (0,) if is_exact or not named else _PREFIXES:
        outside = [_beginning(named, length)] if named else []
        if sum(min(len(name), length or len(name)) for name in named) > 2 * MAX_STATES:
            continue
        work.num_steps = 0
        try:
            machine = _Machine([*languages, *outside], len(languages), work, is_exact=is_exact)
            return list(machine.cells())
        except PatternError:
            continue
    raise PatternError("is too complex beside others")


def _beginning(names: Sequence[str], length: int) -> Node:
    """Return the language of texts that begin like a name, with as many characters; of the names
    alone if there is no length."""
    rows = {name[:length] if length else name: len(name) > length > 0 for name in names}
    return alternatives(
        concatenated(*(Chars(((ord(sign), ord(sign)),)) for sign in text), *([_ALL] * is_cut))
        for text, is_cut in rows.items()
    )


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern is found in a name."""
    derivatives, language = _Derivatives(_Work()), whole_language(pattern)
    for sign in name:
        language = derivatives.after(language, ord(sign))
    return is_nullable(language)


class _Work:
    """Counts the steps of making an automaton."""

    def __init__(self) -> None:
        self.num_steps = 0

    def add(self, num_steps: int) -> None:
        """Raise PatternError if there are too many."""
        self.num_steps += num_steps
        if self.num_steps > MAX_WORK:
            raise PatternError("is too complex beside others")


class _Derivatives:
    """Languages of what may follow a character."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._order: dict[Node, int] = {}
        self._known: dict[tuple[Node, int], Node] = {}

    def after(self, node: Node, code: int) -> Node:
        """Return what may follow a character at the start of a language."""
        key = node, code
        self._work.add(1 + _width(node) // 8)
        if key not in self._known:
            self._known[key] = self._after(node, code)
        return self._known[key]

    def _after(self, node: Node, code: int) -> Node:
        """Return what may follow a character."""
        self._work.add(1 + _width(node) // 8)
        match node:
            case Chars(ranges, names, _):
                if names:
                    raise PatternError("has a Unicode property beside other patterns")
                return _EMPTY if any(low <= code <= high for low, high in ranges) else _NEVER
            case Row(parts):
                if not parts:
                    return _NEVER
                rest = concatenated(*parts[1:])
                found = [_in_turn(self._after(parts[0], code), rest)]
                if is_nullable(parts[0]):
                    found.append(self._after(rest, code))
                return self._choice(found)
            case Choice(options):
                return self._choice([self._after(option, code) for option in options])
            case Repeat(body, least, most):
                less = None if most is None else most - 1
                rest = repeated(body, 0 if is_nullable(body) else max(least - 1, 0), less)
                return _in_turn(self._after(body, code), rest)
            case _:
                raise AssertionError(node)

    def _choice(self, options: Sequence[Node]) -> Node:
        """Return a union that does not depend on the order, so that there are few of them."""
        found = alternatives(options)
        if not isinstance(found, Choice):
            return found
        if _ALL in found.options:
            return _ALL
        for option in found.options:
            self._order.setdefault(option, len(self._order))
        return Choice(tuple(sorted(found.options, key=self._order.__getitem__)))


class _Machine:
    """The deterministic automaton that follows all languages at once."""

    def __init__(
        self, languages: Sequence[Node], outside: int, work: _Work, *, is_exact: bool
    ) -> None:
        """outside: the place of the names to keep apart."""
        self._outside = outside
        self._work = work
        groups = _groups(languages, work)
        derivatives, start = _Derivatives(work), tuple(languages)
        places: dict[_State, int] = {start: 0}
        waiting = [start]
        self._moves: list[dict[int, Ranges]] = []
        for state in waiting:
            moves: dict[int, list[tuple[int, int]]] = {}
            for ranges in groups:
                after = tuple(derivatives.after(node, ranges[0][0]) for node in state)
                if after not in places:
                    places[after] = len(waiting)
                    waiting.append(after)
                    if len(waiting) > MAX_STATES:
                        raise PatternError("is too complex beside others")
                moves.setdefault(places[after], []).extend(ranges)
            self._moves.append({target: joined(ranges) for target, ranges in moves.items()})
        self._kinds = [
            frozenset(i for i, node in enumerate(state) if is_nullable(node)) for state in waiting
        ]
        if not is_exact:
            self._kinds = [kind - {outside} or kind for kind in self._kinds]
        self._merge()

    def _merge(self) -> None:
        """Merge states from which the same follows."""
        numbers: dict[object, int] = {}
        group = [numbers.setdefault(kind, len(numbers)) for kind in self._kinds]
        while True:
            keys: list[object] = []
            self._work.add(sum(map(len, self._moves)))
            for state, moves in enumerate(self._moves):
                by_group: dict[int, list[tuple[int, int]]] = {}
                for target, ranges in moves.items():
                    by_group.setdefault(group[target], []).extend(ranges)
                after = tuple(sorted((to, joined(ranges)) for to, ranges in by_group.items()))
                keys.append((group[state], after))
            numbers = {}
            new = [numbers.setdefault(key, len(numbers)) for key in keys]
            if len(numbers) == len(set(group)):
                break
            group = new
        firsts = {each: group.index(each) for each in dict.fromkeys(group)}
        places = {each: place for place, each in enumerate(firsts)}
        merged: list[dict[int, Ranges]] = []
        for first in firsts.values():
            met: dict[int, list[tuple[int, int]]] = {}
            for target, ranges in self._moves[first].items():
                met.setdefault(places[group[target]], []).extend(ranges)
            merged.append({target: joined(ranges) for target, ranges in met.items()})
        self._kinds = [self._kinds[first] for first in firsts.values()]
        self._moves = merged

    def cells(self) -> Iterator[tuple[frozenset[int], bool, str]]:
        """Yield each cell that has a name."""
        for kind in dict.fromkeys(self._kinds):
            if kind == frozenset((self._outside,)):
                continue  # nobody asks for these
            text = written(self._language(lambda state, kind=kind: self._kinds[state] == kind))
            if len(text) > MAX_CHARS:
                raise PatternError("is too complex beside others")
            yield kind - {self._outside}, self._outside in kind, f"^(?:{text})$"

    def _language(self, is_end: Callable[[int], bool]) -> Node:
        """Return the texts that lead from the first state to an end, by eliminating states. Raises
        PatternError if that gets long."""
        num = len(self._moves)
        start, end = num, num + 1
        edges: dict[int, dict[int, _Way]] = {start: {0: (_EMPTY, 0)}, end: {}}
        for state, moves in enumerate(self._moves):
            edges[state] = {
                target: (Chars(ranges), 8 * len(ranges)) for target, ranges in moves.items()
            }
            if is_end(state):
                edges[state][end] = (_EMPTY, 0)
        sources: dict[int, set[int]] = {state: set() for state in edges}
        for source, targets in edges.items():
            for target in targets:
                sources[target].add(source)
        left = set(range(num))
        while left:
            state = min(left, key=lambda each: (len(sources[each]) * len(edges[each]), each))
            left.remove(state)
            outs = edges.pop(state)
            loop, loop_size = outs.pop(state, (_NEVER, 0))
            for target in outs:
                sources[target].discard(state)
            for source in sources.pop(state) - {state}:
                self._work.add(len(outs))
                targets = edges[source]
                into, size = targets.pop(state)
                for target, (onward, onward_size) in outs.items():
                    way = concatenated(into, repeated(loop, 0, None), onward)
                    other, other_size = targets.get(target, (_NEVER, 0))
                    total = size + loop_size + onward_size + other_size
                    if total > MAX_CHARS:
                        raise PatternError("is too complex beside others")
                    targets[target] = alternatives([other, way]), total
                    sources[target].add(source)
        return edges[start].get(end, (_NEVER, 0))[0]


def _width(node: Node) -> int:
    """Return the number of parts in rows, each of which makes a step longer."""
    match node:
        case Row(parts):
            return len(parts)
        case Choice(options):
            return sum(map(_width, options))
        case _:
            return 1


def _in_turn(first: Node, rest: Node) -> Node:
    return _ALL if first == rest == _ALL else concatenated(first, rest)


def _groups(languages: Sequence[Node], work: _Work) -> list[Ranges]:
    """Return the characters of names in groups that no language tells apart."""
    classes = list(dict.fromkeys(ranges for node in languages for ranges in _classes(node)))
    cuts = {low for ranges in classes for low, _ in ranges}
    cuts |= {high + 1 for ranges in classes for _, high in ranges}
    groups: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for low, high in _SIGNS:
        places = sorted({low, *(cut for cut in cuts if low < cut <= high)})
        work.add(len(places) * len(classes) // 8)
        for first, after in zip(places, [*places[1:], high + 1], strict=True):
            key = tuple(any(a <= first <= b for a, b in ranges) for ranges in classes)
            groups.setdefault(key, []).append((first, after - 1))
    return [joined(ranges) for ranges in groups.values()]


def _classes(node: Node) -> Iterator[Ranges]:
    match node:
        case Chars(ranges):
            yield ranges
        case Row(parts) | Choice(parts):
            for part in parts:
                yield from _classes(part)
        case Repeat(body):
            yield from _classes(body)
        case _:
            pass


_OBJECT = ("properties", "patternProperties", "additionalProperties")
_BESIDE = ("$ref", "anyOf", "oneOf", "enum", "const")
MAX_NAMES = 3_000
"""Most names that are written out in schemas of one object, in all of them together."""


class NameScopes:
    """Finds what the names of each object have to be told apart by. Where schemas of one object are
    combined, it is the same for all, so that equal cells meet."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], *, is_bounded: bool = False) -> None:
        """is_bounded: patterns are at fault that would take more than `MAX_SCHEMA_WORK`."""
        self._num_left = MAX_SCHEMA_WORK if is_bounded else None
        objects = [node for node in nodes if any(keyword in node for keyword in _OBJECT)]
        self.are_combined = any(map(_combines, nodes))
        self._kept: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._all: tuple[str, ...] = ()
        self._named: tuple[str, ...] = ()
        self._is_too_much = False
        if self.are_combined:
            self._all = tuple(
                dict.fromkeys(name for node in objects for name in _patterns_of(node))
            )
            if any(not _is_open(node.get("additionalProperties", True)) for node in objects):
                names = dict.fromkeys(name for node in nodes for name in _names_of(node))
                self._named = tuple(names)
                self._is_too_much = len(names) * len(objects) > MAX_NAMES

    def split(self, node: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return keywords that stand for those of an object's names, so that no two patterns have a
        name in common, and no name has a spelling that another pattern would let pass; None if they
        are fine as they are."""
        if self.are_combined:
            return self._split_combined(node)
        patterns, names = _patterns_of(node), node.get("properties")
        others: object = node.get("additionalProperties", True)
        if not patterns and (others is False or not names):
            return None
        if len(patterns) == 1 and others is False:  # nothing to be told apart from
            return self.translated(node)
        named = tuple(names) if names and not _is_open(others) and others is not False else ()
        cells = _cells(self._kept_of(patterns), named, is_exact=False)
        if cells is None:
            return self.translated(node)
        if others is False:
            cells = [cell for cell in cells if cell[0]]
        found = self._by_cell(node, cells, self._kept_of(patterns))
        return {"patternProperties": found, "additionalProperties": False}

    def translated(self, node: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the patterns of an object's names as they are, in the library's syntax; None if
        there are none."""
        patterns = _patterns_of(node)
        if not patterns:
            return None
        schemas: Mapping[str, object] = node["patternProperties"]
        named = {f"^(?:{whole_regex(pattern)})$": schemas[pattern] for pattern in patterns}
        return {"patternProperties": named}

    def _split_combined(self, node: Mapping[str, Any]) -> dict[str, Any] | None:
        scope = self._kept_of(self._all)
        cells = None if self._is_too_much else _cells(scope, self._named, is_exact=True)
        if cells is None:
            return self.translated(node)
        if not any(keyword in node for keyword in _OBJECT):
            return None
        own, others = _patterns_of(node), node.get("additionalProperties", True)
        names: dict[str, object] = dict(node.get("properties", {}))
        for name in self._named:
            if name not in names:
                is_matched = any(matches(pattern, name) for pattern in own)
                names[name] = True if is_matched else others
        return {
            "properties": names,
            "patternProperties": self._by_cell(node, cells, scope),
            "additionalProperties": False,
        }

    def _by_cell(
        self, node: Mapping[str, Any], cells: Cells, scope: tuple[str, ...]
    ) -> dict[str, object]:
        """Return the schema of each cell's names; not of those that are named."""
        patterns, others = _patterns_of(node), node.get("additionalProperties", True)
        found: dict[str, object] = {}
        for kind, is_named, text in cells:
            held = [scope[place] for place in sorted(kind) if scope[place] in patterns]
            schemas: list[object] = [node["patternProperties"][name] for name in held]
            if schemas or not is_named:
                schemas = schemas or [others]
                found[text] = schemas[0] if len(schemas) == 1 else {"allOf": schemas}
        return found

    def at_fault(self, node: Mapping[str, Any]) -> list[str]:
        """Return the patterns of an object that cannot be told apart from others before them."""
        patterns = _patterns_of(node)
        others: object = node.get("additionalProperties", True)
        if not patterns or not (self.are_combined or patterns[1:] or others is not False):
            return []
        kept = self._kept_of(self._all or patterns)
        return [name for name in patterns if name not in kept]

    def _kept_of(self, patterns: tuple[str, ...]) -> tuple[str, ...]:
        if patterns not in self._kept:
            kept: tuple[str, ...] = ()
            for name in patterns if len(self._kept) < MAX_SETS else ():
                kept = (*kept, name) if self._are_told_apart((*kept, name)) else kept
            self._kept[patterns] = kept
        return self._kept[patterns]

    def _are_told_apart(self, patterns: tuple[str, ...]) -> bool:
        if self._num_left is not None and self._num_left <= 0:
            return False
        cells, num_steps = _counted_cells(patterns, (), is_exact=True)
        if self._num_left is not None:
            self._num_left -= num_steps
        return bool(cells)


def _cells(patterns: tuple[str, ...], named: tuple[str, ...], *, is_exact: bool) -> Cells | None:
    return _counted_cells(patterns, named, is_exact=is_exact)[0]


@functools.lru_cache(maxsize=512)
def _counted_cells(
    patterns: tuple[str, ...], named: tuple[str, ...], *, is_exact: bool
) -> tuple[Cells | None, int]:
    """Return cells, None if they take too much or nest too deeply, and the steps that it took."""
    work = _Work()
    try:
        return name_cells(patterns, named, is_exact=is_exact, work=work), work.num_steps
    except (PatternError, RecursionError):
        return None, work.num_steps


def _is_open(others: object) -> bool:
    return others is True or others == {}


def _names_of(node: Mapping[str, Any]) -> list[str]:
    names, required = node.get("properties"), node.get("required")
    found = list(cast("dict[str, object]", names)) if isinstance(names, dict) else []
    listed = cast("list[object]", required) if isinstance(required, list) else []
    return found + [name for name in listed if isinstance(name, str)]


def _patterns_of(node: Mapping[str, Any]) -> tuple[str, ...]:
    named: object = node.get("patternProperties")
    return tuple(cast("dict[str, object]", named)) if isinstance(named, dict) else ()


def _combines(node: Mapping[str, Any]) -> bool:
    """Return whether several schemas of one object hold at once."""
    parts: object = node.get("allOf")
    number = len(cast("list[object]", parts)) if isinstance(parts, list) else 0
    number += any(keyword in node for keyword in _OBJECT)
    return number + sum(keyword in node for keyword in _BESIDE) > 1
