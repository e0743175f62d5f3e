"""Writes a grammar in the form of Lark that the grammar library takes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.base.errors import RequestError
from quire.protocol.grammar import GrammarKind, GrammarSpec
from quire.protocol.json_schema.types import Schema
from quire.text.dialect.spec import Markers

__all__ = ["Rules", "json_grammar", "refusal_text", "regex"]

MAX_SCHEMA_CHARS = 4 * 2**20
"""Most characters that the schemas of one request may add to its grammar."""

_SIGNS = re.compile(r"[\\.+*?()|\[\]{}^$/&~#]")
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def json_grammar(schema: Schema, *, is_strict: bool) -> GrammarSpec:
    """The JSON values of a schema."""
    return GrammarSpec(GrammarKind.JSON, json.dumps(dict(schema), ensure_ascii=False), is_strict)


def refusal_text(where: str, path: str, why: str) -> str:
    """Return the text of the error for a keyword of a strict schema. where: the field of the
    request."""
    return (
        f"{where} has {path}, which {why} in the format that this model calls tools in. Leave it "
        "out, or set strict to false: then it is not checked."
    )


def regex(text: str) -> str:
    """A regular expression for one text, in the form that stands between slashes."""
    escaped = _SIGNS.sub(lambda sign: "\\" + sign[0], text)
    return "".join(_ESCAPES.get(character, character) for character in escaped)


class Rules:
    """The rules so far, and the grammars that they refer to by name. tokens: tokens of the markers.
    left_out: paths of keywords that the rules do not enforce, in schemas that are not strict."""

    def __init__(self, tokens: Markers) -> None:
        self.tokens = tokens
        self.left_out: list[str] = []
        self._lines: dict[str, None] = {}
        self._grammars: dict[str, dict[str, object]] = {}
        self._patterns: dict[str, dict[str, str]] = {}
        self._num_chars = 0

    def spec(self, start: str) -> GrammarSpec:
        """The whole grammar, whose first rule is `start`."""
        lark = "\n".join([f"start: {start}", *self._lines])
        source = {"lark": lark, "patterns": self._patterns, "grammars": self._grammars}
        is_strict = all(part["is_strict"] for part in self._grammars.values())
        return GrammarSpec(GrammarKind.ANSWER, json.dumps(source, ensure_ascii=False), is_strict)

    def add(self, rule: str) -> None:
        """Write one rule, unless it is there already."""
        self._lines[rule] = None

    def grammar(self, name: str, spec: GrammarSpec, where: str = "") -> str:
        """Return a reference to a grammar. where: its name in an error. RequestError as in
        `charge`."""
        self.charge(len(spec.source), where)
        self._grammars[name] = {
            "kind": spec.kind.value,
            "source": spec.source,
            "is_strict": spec.is_strict,
            "whitespace": spec.whitespace,
            "where": where,
        }
        return f"@{name}"

    def leave_out(self, where: str, path: str, why: str, *, is_strict: bool) -> None:
        """Note a keyword that the rules do not hold to. Raises RequestError if the schema is
        strict. where: the field of the request."""
        if is_strict:
            raise RequestError(refusal_text(where, path, why))
        self.left_out.append(f"{path} ({why} in the format that this model calls tools in)")

    def charge(self, num_chars: int, where: str) -> None:
        """Count characters that schemas add to the grammar. Raises RequestError if they are too
        many: small schemas may refer to large ones many times."""
        self._num_chars += num_chars
        if self._num_chars > MAX_SCHEMA_CHARS:
            raise RequestError(
                f"{where} makes the grammar of the answer longer than {MAX_SCHEMA_CHARS:,} "
                "characters. Send fewer tools, or refer to fewer large definitions."
            )

    def literal(self, text: str) -> str:
        """Return one text, with markers as tokens."""
        return " ".join(map(self.one, self.tokens.split(text)))

    def plain(self, text: str) -> str:
        """Return one text in which nothing is a marker."""
        return json.dumps(text, ensure_ascii=False)

    def up_to(
        self,
        name: str,
        end: str,
        bodies: Sequence[str],
        others: Sequence[str] = (),
        length: tuple[int, int | None] = (0, None),
        pattern: tuple[str, str] | None = None,
    ) -> str:
        """Add the terminal `name`, and return a rule for a text up to and including the first
        `end`. bodies: regular expressions that the text must match. others: expressions that it
        must not match. length: fewest and most characters. pattern: a client's expression that it
        must match too, and the error if the grammar library refuses it, or "" to go on without."""
        parts = self.tokens.split(end)
        marker = next((part for part in parts if isinstance(part, int)), None)
        first = parts[0] if isinstance(parts[0], str) else ""
        tail = regex(first)
        terms = [f"/({body}){tail}/" for body in bodies]
        if pattern is not None:
            terms.append(f"{name}_PATTERN")
            self._patterns[terms[-1]] = {"regex": f"/({pattern[0]}){tail}/", "refusal": pattern[1]}
        if length != (0, None):
            least, most = (None if each is None else each + len(first) for each in length)
            terms.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
        terms += [f"~/({other}){tail}/" for other in others]
        if marker is None:
            terms.append(f"~/(?s:.*){tail}(?s:.+)/")
            rest: list[str | int] = []
        else:
            its_text = next(text for text, i in self.tokens.ids.items() if i == marker)
            if its_text not in self.tokens.special:
                terms.append(f"~/(?s:.*){regex(its_text)}(?s:.*)/")
            rest = parts[1:] if first else parts
        self.add(f"{name}: {' & '.join(terms)}")
        return " ".join([name, *map(self.one, rest)])

    def one(self, part: str | int) -> str:
        """Return one piece of a text (`Markers.split`)."""
        return f"<[{part}]>" if isinstance(part, int) else self.plain(part)

    def text_without(self, marker: str) -> str:
        """Any text without a marker. Special tokens are never text."""
        texts = {i: text for text, i in self.tokens.ids.items()}
        parts = self.tokens.split(marker)
        tokens = [texts[part] for part in parts if isinstance(part, int)]
        if any(token in self.tokens.special for token in tokens):
            return "/(?s:.*)/"
        return f"/(?s:.*)/ & ~/(?s:.*){regex(tokens[0] if tokens else marker)}(?s:.*)/"
