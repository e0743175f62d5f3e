"""The form in which the models of one family write thinking and tool calls."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

__all__ = [
    "ArgumentStyle",
    "Dialect",
    "IdStyle",
    "MarkerSource",
    "Markers",
    "ParameterSyntax",
    "TailSource",
    "Thinking",
    "thinking_at_end",
]

_SYMBOL = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"<[^<>\s]+>")
_FIRST_SYMBOL = 0xD800
"""Halves of surrogate pairs, which no decoded text contains."""


class Thinking(enum.StrEnum):
    """State in which a prompt leaves the model: within its thinking, behind it (with channels:
    within another message), or free to begin it."""

    OPEN = "open"
    CLOSED = "closed"
    NONE = "none"


class ArgumentStyle(enum.StrEnum):
    """JSON: one JSON object. RAW: tagged values, texts unchanged and other values as JSON. PYTHON:
    `name=literal`, with commas. CHANNELS: JSON objects as messages of their own."""

    JSON = "json"
    RAW = "raw"
    PYTHON = "python"
    CHANNELS = "channels"


class IdStyle(enum.StrEnum):
    """RANDOM: `call_` and 24 hexadecimal digits. SHORT: 9 letters and digits. COUNTED:
    `functions.NAME:i`, counted through the conversation."""

    RANDOM = "random"
    SHORT = "short"
    COUNTED = "counted"


class MarkerSource(Protocol):
    """The functions of a tokenizer that dialects use."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary, None if there is none."""
        ...

    def is_added(self, token_id: int) -> bool:
        """Return True for a token that was added to the model's vocabulary."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return True for a token that is left out of shown texts."""
        ...


class TailSource(MarkerSource, Protocol):
    """The reader of a prompt's tail."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        ...


@dataclass(frozen=True, slots=True)
class Markers:
    """Texts that are single tokens of one tokenizer. special: markers that never occur in text."""

    ids: Mapping[str, int] = field(default_factory=dict[str, int])
    special: frozenset[str] = frozenset()

    @classmethod
    def of(cls, texts: Iterable[str], tokenizer: MarkerSource) -> Markers:
        """Find those of `texts` that are tokens."""
        found = {text: tokenizer.token_id(text) for text in texts}
        ids = {text: i for text, i in found.items() if i is not None and tokenizer.is_added(i)}
        return cls(ids, frozenset(text for text, i in ids.items() if tokenizer.is_special(i)))

    @property
    def symbols(self) -> Mapping[int, str]:
        """Characters that stand for markers in `coded` texts, by token id."""
        return {i: chr(_FIRST_SYMBOL + n) for n, i in enumerate(self.ids.values())}

    def split(self, text: str) -> list[str | int]:
        """Return the text as token ids of markers and the texts between them."""
        parts: list[str | int] = [text]
        for marker in sorted(self.ids, key=len, reverse=True):
            parts = [
                piece
                for part in parts
                for piece in (self._cut(part, marker) if isinstance(part, str) else [part])
            ]
        return [part for part in parts if part != ""]

    def _cut(self, text: str, marker: str) -> list[str | int]:
        first, *others = text.split(marker)
        return [first, *(piece for other in others for piece in (self.ids[marker], other))]

    def coded(self, text: str) -> str:
        """Return the text with one character for each marker that is a token."""
        symbols = self.symbols
        return "".join(p if isinstance(p, str) else symbols[p] for p in self.split(text))

    def shown(self, text: str, *, with_special: bool) -> str:
        """Return `coded` text in the form that a reader sees."""
        if _SYMBOL.search(text) is None:
            return text
        for marker, token_id in self.ids.items():
            seen = marker if with_special or marker not in self.special else ""
            text = text.replace(self.symbols[token_id], seen)
        return text


@dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """The text around one tagged value: open NAME middle VALUE close. middle_json: used instead of
    `middle` before values that are no texts, where the family distinguishes them."""

    open: str
    middle: str
    close: str
    middle_json: str = ""

    @property
    def key_end(self) -> str:
        """The text behind each name, the same for all values."""
        pairs = zip(self.middle, self.middle_json or self.middle, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        return "".join(one for one, _ in same)

    def coded(self, tokens: Markers) -> ParameterSyntax:
        """Return it with one character for each marker that is a token."""
        texts = (self.open, self.middle, self.close, self.middle_json)
        return ParameterSyntax(*map(tokens.coded, texts))


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of one call: open NAME (id_open ID) middle ARGUMENTS (id_close ID ") close. Calls
    stand in the text, or in a section that they share.

    section: texts before the first call and behind the last one. separator: text between two calls.
    id_open: text before an id that follows the name. id_close: text before an id that may follow
    the arguments. is_bare: calls have no marker, so an answer is either calls or text. is_single: a
    turn has at most one call. text_wrap: texts around a text written as a JSON string, where an
    answer is either calls or such a text. describes_tools: the system prompt must describe the
    tools. thinking: two markers. stops: tokens that end an answer besides the end of text. markers:
    texts of calls that are tokens in the family's tokenizers. tokens: the markers that are tokens
    in this tokenizer.
    """

    name: str
    open: str
    middle: str
    close: str
    style: ArgumentStyle = ArgumentStyle.JSON
    section: tuple[str, str] = ("", "")
    separator: str = ""
    id_open: str = ""
    id_close: str = ""
    ids: IdStyle = IdStyle.RANDOM
    parameter: ParameterSyntax | None = None
    is_bare: bool = False
    is_single: bool = False
    text_wrap: tuple[str, str] | None = None
    describes_tools: bool = False
    thinking: tuple[str, str] | None = None
    stops: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    tokens: Markers = field(default_factory=Markers)

    def bound(self, tokenizer: MarkerSource) -> Dialect:
        """Return the dialect in the tokens of one tokenizer."""
        around = self.thinking or ()
        tags = (tag for marker in around for tag in _TAG.findall(marker))
        texts = dict.fromkeys((*self.markers, *around, *tags, *self.stops))
        return replace(self, tokens=Markers.of(texts, tokenizer))

    @property
    def thinks(self) -> bool:
        """True if answers may have thinking apart from their text."""
        return self.thinking is not None or self.style is ArgumentStyle.CHANNELS

    @property
    def has_all_tokens(self) -> bool:
        """True if all of `markers` and `stops` are tokens."""
        return self.tokens.ids.keys() >= {*self.markers, *self.stops}

    def coded(self) -> Dialect:
        """Return the dialect with one character for each marker that is a token
        (`Markers.coded`)."""
        coded = self.tokens.coded
        return replace(
            self,
            open=coded(self.open),
            middle=coded(self.middle),
            close=coded(self.close),
            section=(coded(self.section[0]), coded(self.section[1])),
            separator=coded(self.separator),
            id_open=coded(self.id_open),
            id_close=coded(self.id_close),
            parameter=self.parameter and self.parameter.coded(self.tokens),
            thinking=self.thinking and (coded(self.thinking[0]), coded(self.thinking[1])),
            markers=tuple(map(coded, self.markers)),
        )

    @property
    def opening(self) -> str:
        """The text before the name of the first call of a section."""
        return self.section[0] + self.open

    @property
    def trigger(self) -> str:
        """The beginning of a call that text never contains; for a bare call all before its name."""
        starts = [marker for marker in self.markers if self.opening.startswith(marker)]
        return max(starts, key=len, default=self.opening)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids of `stops`."""
        ids = self.tokens.ids
        return frozenset(ids[text] for text in self.stops if text in ids)


def thinking_at_end(
    dialect: Dialect, prompt_token_ids: Sequence[int], tokenizer: TailSource
) -> Thinking:
    """Return the state in which a prompt leaves the model. It is decided by the text after the last
    token that begins or ends a turn. Markers that are spelled by other tokens count only at the
    very end, since a user may have written them."""
    if dialect.style is ArgumentStyle.CHANNELS:
        return _channel_at_end(dialect, prompt_token_ids, tokenizer)
    if dialect.thinking is None:
        return Thinking.NONE
    ids = dialect.tokens.ids
    own = frozenset(ids.values())
    tail: list[int] = []
    for token_id in reversed(prompt_token_ids):
        if token_id not in own and _ends_turn(token_id, tokenizer):
            break
        tail.append(token_id)
    tail.reverse()
    last = dict[Thinking, int]()
    for marker, state in zip(dialect.thinking, (Thinking.OPEN, Thinking.CLOSED), strict=True):
        if marker in ids:
            places = [i for i, token_id in enumerate(tail) if token_id == ids[marker]]
            last[state] = max(places, default=-1)
        else:
            text = tokenizer.decode(tail, skip_special_tokens=False).rstrip()
            last[state] = len(tail) if text.endswith(marker.rstrip()) else -1
    if max(last.values()) < 0:
        return Thinking.NONE
    return max(last, key=lambda state: last[state])


def _ends_turn(token_id: int, tokenizer: TailSource) -> bool:
    """Return True for a token that only a template writes. Families add such tokens as special
    ones, or as others beside runs of white space, which are text."""
    if tokenizer.is_special(token_id):
        return True
    if not tokenizer.is_added(token_id):
        return False
    return bool(tokenizer.decode((token_id,), skip_special_tokens=False).strip())


def _channel_at_end(
    dialect: Dialect, prompt_token_ids: Sequence[int], tokenizer: TailSource
) -> Thinking:
    """Return the state of a prompt whose last message may be left open: its last marker is then the
    one behind a header, which names the channel."""
    ids = dialect.tokens.ids
    own = frozenset(ids.values())
    content: int | None = None
    for place in range(len(prompt_token_ids) - 1, -1, -1):
        token_id = prompt_token_ids[place]
        if token_id not in own:
            continue
        if content is None:
            if token_id != ids.get("<|message|>"):
                return Thinking.NONE
            content = place
        elif token_id != ids.get("<|constrain|>"):
            name = tokenizer.decode(prompt_token_ids[place + 1 : content]).strip()
            is_analysis = token_id == ids.get("<|channel|>") and name.startswith("analysis")
            return Thinking.OPEN if is_analysis else Thinking.CLOSED
    return Thinking.NONE
