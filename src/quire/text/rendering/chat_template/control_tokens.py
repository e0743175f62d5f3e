"""Control tokens of a model, told apart from texts of the same spelling in what users wrote.

A template writes turns with tokens such as `<|im_end|>`. Where a message has that text, the
tokenizer would make the token of it, and the message could end its turn and open another one. Where
that could happen, a conversation is rendered twice: unchanged, and with the signs of control tokens
in it replaced. Control tokens that are left in the second text are the template's own.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from quire.base.errors import RequestError
from quire.protocol.step import IntArray
from quire.text.rendering.messages import plain_data

if TYPE_CHECKING:
    import tokenizers

__all__ = ["ChatText", "ControlTokens", "Spans", "shifted"]

Spans = tuple[tuple[int, int], ...]
"""Beginnings and ends of texts, in order."""
Render = Callable[[Any], str]

_BARS = "|｜"
_BARRED = re.compile("<[^<>]*[|｜][^<>]*>|｜.+｜")
_FIRST_CODE, _LAST_CODE = 0xE200, 0xEFFF
_ALIAS = ("\uf100", "\uf101")
_DIGITS = [chr(0xF000 + i) for i in range(16)]
_ROLES = frozenset(("user", "assistant", "system", "developer", "tool", "function", "ipython"))
"""Some templates write a role between the signs of a control token."""


class ChatText(NamedTuple):
    """A rendered chat. own: the control tokens in it that its template wrote; None if these are
    all that there are."""

    text: str
    own: Spans | None = None


class ControlTokens:
    """The control tokens of one tokenizer: its special tokens, and other added tokens whose names
    have bars. Markers of thinking are none, since they open no turn. texts: its added tokens.
    special: ids of the special ones. unknown: ids that stand for any text."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        texts: Mapping[str, int],
        special: frozenset[int],
        unknown: frozenset[int] = frozenset(),
    ) -> None:
        self._backend = backend
        self._unknown = unknown
        self.ids = {
            text: token_id
            for text, token_id in texts.items()
            if _signs_of(text)
            and "think" not in text.lower()
            and (token_id in special or _BARRED.fullmatch(text))
        }
        self._signs = frozenset("".join(map(_signs_of, self.ids)))
        self._sorted_ids = np.array(sorted(self.ids.values()), np.int32)
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def rendered(self, render: Render, given: Any) -> ChatText:
        """Render what a request gave, of which all strings are content but the usual roles."""
        text = render(given)
        if not self.ids:
            return ChatText(text)
        data = plain_data(given)
        content: list[str] = []
        _collect(data, content)
        written = "".join(content)
        signs = [sign for sign in self._signs if sign in written]
        letters = {role[0] for role in _roles(data) if role and role not in _ROLES}
        if not signs and not letters:
            return ChatText(text)
        unused = _unused(written + text)
        codes = {sign: next(unused) for sign in signs}
        of_roles = {letter: next(unused) for letter in letters}
        veiled = render(_veiled(data, codes, of_roles))
        both = [*codes.items(), *of_roles.items()]
        for _, code in both:  # some templates write JSON in ASCII
            veiled = veiled.replace(f"\\u{ord(code):04x}", code)
        own = self.spans(veiled)
        for sign, code in both:
            veiled = veiled.replace(code, sign)
        found = self.spans(text)
        if [text[slice(*span)] for span in found] == [veiled[slice(*span)] for span in own]:
            return ChatText(text)
        # A template that read such signs wrote another text: then that without them is safe.
        return ChatText(veiled, own)

    def needs_time(self, data: Any) -> bool:
        """Return True if `encode` may have to copy the tokenizer for these messages, which takes
        up to seconds once."""
        if not self.ids or "_plain" in self.__dict__:
            return False
        content: list[str] = []
        _collect(data, content)
        # An escape in JSON may stand for any sign.
        return any("\\u" in text or self._pattern.search(text) for text in content)

    def spans(self, text: str) -> Spans:
        """Return where control tokens stand in a text, whoever wrote them."""
        return tuple(match.span() for match in self._pattern.finditer(text)) if self.ids else ()

    def message_ends(self, token_ids: IntArray) -> IntArray:
        """Return the numbers of tokens after which a control token follows one that is none: int32,
        in order. Each message ends at one of them, and so does the description of tools."""
        is_control = np.isin(token_ids, self._sorted_ids)
        return (np.flatnonzero(is_control[1:] & ~is_control[:-1]) + 1).astype(np.int32)

    def encode(self, text: str, own: Spans) -> list[int]:
        """Token ids of a text in which only the tokens at `own` are control tokens."""
        plain, aliases, ids = self._plain
        parts: list[str] = []
        place = 0
        for start, end in own:
            parts += (text[place:start], aliases[text[start:end]])
            place = end
        parts.append(text[place:])
        whole = _ids(plain, "".join(parts), ids)
        controls = frozenset(self.ids.values()) - self._unknown
        expected = [self.ids[text[slice(*span)]] for span in own]
        expected = [i for i in expected if i in controls]
        if [i for i in whole if i in controls] == expected:
            return whole
        # The vocabulary has it as a piece of text too, or the tokenizer changed what stands for it.
        by_alias = {alias: self.ids[text] for text, alias in aliases.items()}
        found: list[int] = []
        for part in filter(None, parts):
            if part in by_alias:
                found.append(by_alias[part])
                continue
            piece = _ids(plain, part, ids)
            if not controls.isdisjoint(piece):
                piece = [i for sign in part for i in _ids(plain, sign, ids)]
            found += piece
        return found

    @cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, Mapping[str, str], Mapping[int, int]]:
        """A copy of the tokenizer that knows control tokens by other names alone, which nobody can
        guess; these names; and the ids that differ from the copy's."""
        import tokenizers

        secret = "".join(secrets.choice(_DIGITS) for _ in range(16))
        names = {
            text: f"{_ALIAS[0]}{secret}{''.join(_DIGITS[int(d, 16)] for d in f'{i:x}')}{_ALIAS[1]}"
            for i, text in enumerate(self.ids)
        }
        data = cast("dict[str, Any]", json.loads(self._backend.to_str()))
        for token in cast("list[dict[str, Any]]", data["added_tokens"]):
            token["content"] = names.get(token["content"], token["content"])
        plain = tokenizers.Tokenizer.from_str(json.dumps(data, ensure_ascii=False))
        texts = {name: text for text, name in names.items()}
        ids: dict[int, int] = {}
        for its_id, token in plain.get_added_tokens_decoder().items():
            its_text = texts.get(token.content, token.content)
            found = self._backend.token_to_id(its_text)
            if found is not None and found != its_id:
                ids[its_id] = found
        return plain, names, ids


def _signs_of(text: str) -> str:
    """Characters of a control token, one of which stands in what is part of it: its bars, or its
    first and last sign. Empty for a token that is written like a word."""
    bars = "".join(sign for sign in text if sign in _BARS)
    if bars:
        return bars
    ends = text[:1] + text[-1:]
    return "" if any(sign.isalnum() or sign.isspace() for sign in ends) else ends


def _ids(plain: tokenizers.Tokenizer, text: str, ids: Mapping[int, int]) -> list[int]:
    (found,) = plain.encode_batch_fast([text], add_special_tokens=False)
    return [ids.get(i, i) for i in found.ids]


def _collect(data: Any, found: list[str]) -> None:
    """Gather all strings of a value, also the names in its objects."""
    if isinstance(data, str):
        found.append(data)
    elif isinstance(data, dict):
        for key, value in cast("dict[Any, Any]", data).items():
            _collect(key, found)
            _collect(value, found)
    elif isinstance(data, list):
        for value in cast("list[Any]", data):
            _collect(value, found)


def _roles(given: Any) -> list[str]:
    messages = cast("list[dict[str, Any]]", given["messages"])
    return [message["role"] for message in messages]


def _unused(text: str) -> Iterator[str]:
    """Yield characters for private use that a text has not. RequestError when there is none."""
    used = frozenset(text)
    yield from (sign for code in range(_FIRST_CODE, _LAST_CODE) if (sign := chr(code)) not in used)
    raise RequestError(
        f"The messages have nearly all characters from U+{_FIRST_CODE:X} to U+{_LAST_CODE - 1:X}, "
        "so none can stand for those of control tokens. Send fewer of them."
    )


def _veiled(data: Any, codes: Mapping[str, str], of_roles: Mapping[str, str]) -> Any:
    """Return a copy of a value in whose strings other characters stand for signs. of_roles:
    characters for the first letters of unusual roles."""

    def veiled(value: Any) -> Any:
        if isinstance(value, str):
            for sign, code in codes.items():
                value = value.replace(sign, code)
            return value
        if isinstance(value, list):
            return [veiled(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            pairs = cast("dict[Any, Any]", value).items()
            return {veiled(key): veiled(item) for key, item in pairs}
        return value

    found = veiled(data)
    for message in found["messages"]:
        role: str = message["role"]
        if role and role not in _ROLES:
            message["role"] = of_roles.get(role[0], role[0]) + role[1:]
    return found


def shifted(own: Sequence[tuple[int, int]], start: int) -> Spans:
    """Return the spans in the text from `start` on."""
    return tuple((first - start, end - start) for first, end in own if first >= start)
