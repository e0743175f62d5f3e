"""Writes a grammar in the form of Lark that the grammar library takes."""

from __future__ import annotations

import json
import re

from quire.dialect.spec import Markers
from quire.protocol.grammar import GrammarKind, GrammarSpec

__all__ = ["Rules", "regex"]

_SIGNS = re.compile(r"[\\.+*?()|\[\]{}^$/&~#]")
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def regex(text: str) -> str:
    """A regular expression of one text, as it stands between slashes."""
    escaped = _SIGNS.sub(lambda sign: "\\" + sign[0], text)
    return "".join(_ESCAPES.get(character, character) for character in escaped)


class Rules:
    """The rules so far, and the grammars that they refer to by name. tokens: of the markers."""

    def __init__(self, tokens: Markers) -> None:
        self.tokens = tokens
        self._lines: dict[str, None] = {}
        self._grammars: dict[str, dict[str, object]] = {}

    def spec(self, start: str) -> GrammarSpec:
        """All of it, of which `start` is the first rule."""
        lark = "\n".join([f"start: {start}", *self._lines])
        source = {"lark": lark, "grammars": self._grammars}
        return GrammarSpec(GrammarKind.ANSWER, json.dumps(source, ensure_ascii=False))

    def add(self, rule: str) -> None:
        """Write one rule, or one that is there already."""
        self._lines[rule] = None

    def grammar(self, name: str, spec: GrammarSpec, where: str = "") -> str:
        """A reference to a grammar. where: what an error calls it."""
        self._grammars[name] = {
            "kind": spec.kind.value,
            "source": spec.source,
            "is_strict": spec.is_strict,
            "whitespace": spec.whitespace,
            "where": where,
        }
        return f"@{name}"

    def literal(self, text: str) -> str:
        """One text, markers as tokens."""
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part, ensure_ascii=False)
            for part in self.tokens.split(text)
        )

    def text_without(self, marker: str) -> str:
        """Any text that does not contain a marker. Special tokens are no text in any case."""
        if marker in self.tokens.special:
            return "/(?s:.*)/"
        return f"/(?s:.*)/ & ~/(?s:.*){regex(marker)}(?s:.*)/"
