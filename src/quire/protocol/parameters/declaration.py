"""Declarations of parameters: a field states its bounds, its meaning and the APIs that take it.

Checks, bodies of requests, flags and docs are made from the declarations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from quire.base.errors import RequestError, quoted
from quire.protocol.codec import is_unicode

__all__ = [
    "MAX_INT",
    "Apis",
    "Declared",
    "Parameter",
    "checked_integer",
    "checked_items",
    "checked_real",
    "checked_text",
    "checked_token_ids",
    "declared",
    "documented",
    "parameter",
]

MAX_INT = 2**31 - 1

Apis = Literal["python", "openai", "all"]
"""Interfaces that take a parameter: Python alone; completions and chats too; or all of these,
messages and responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Facts about a field.

    text: its meaning, in one line of the docs and of its flag. note: more for the docs.
    low, high: bounds of a number, both allowed. advice: last words of the error about them.
    most, most_chars: bounds of a list of texts, and of each text; None for no such list.
    has_flag: `quire chat` and `quire complete` have a flag for it.
    is_filter: leaves tokens out of draws. not_in_beams: reason for which beam search refuses it;
        filters need none.
    in_receipt: receipts state it. False for what changes no token, and for what they state in
        another form.
    in_config: its name in generation_config.json of `transformers`; empty for none. in_gguf: the
        same behind "general.sampling." in GGUF files.
    others: names in other engines.
    """

    text: str
    note: str = ""
    low: float = -math.inf
    high: float = math.inf
    advice: str = "leave it out for the default"
    most: int | None = None
    most_chars: int = 0
    apis: Apis = "openai"
    has_flag: bool = False
    is_filter: bool = False
    not_in_beams: str = ""
    in_receipt: bool = True
    in_config: str = ""
    in_gguf: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Declared:
    """A parameter and its field. kind: int, float or bool, or None for anything else. is_optional:
    it may be None. in_json: type of its value in a request's body."""

    name: str
    default: object
    kind: type[int] | type[float] | type[bool] | None
    is_optional: bool
    in_json: Any
    facts: Parameter

    def checked(self, value: object) -> object:
        """Return a number, a switch or bounded texts in their normal form, and anything else as it
        is. RequestError with name, value and bounds for a bad one."""
        facts = self.facts
        if value is None and self.is_optional:
            return value
        if facts.most is not None:
            return _checked_texts(self.name, value, facts.most, facts.most_chars)
        if self.kind is None:
            return value
        if self.kind is float:
            return checked_real(self.name, value, facts.low, facts.high, facts.advice)
        if self.kind is int:
            low, high = int(facts.low), int(facts.high)
            return checked_integer(self.name, value, low, high, facts.advice)
        if not isinstance(value, bool):
            raise RequestError(
                f"{self.name} is {quoted(value)}, but it is a switch. Use true or false."
            )
        return value


def parameter(default: Any, text: str, **facts: Any) -> Any:
    """A field with the facts of `Parameter`."""
    stated = Parameter(text=text, **facts)
    return field(default=default, metadata={"parameter": stated, "others": stated.others})


def declared(owner: type[Any]) -> Mapping[str, Declared]:
    """Return the parameters that a dataclass declares, by name."""
    hints = get_type_hints(owner)
    found: dict[str, Declared] = {}
    for item in fields(owner):
        facts: Parameter = item.metadata["parameter"]
        options = [each for each in get_args(hints[item.name]) if each is not NoneType]
        is_optional = NoneType in get_args(hints[item.name])
        kind = options[0] if is_optional and len(options) == 1 else hints[item.name]
        found[item.name] = Declared(
            item.name,
            item.default,
            kind if kind in (int, float, bool) else None,
            is_optional,
            _in_json(hints[item.name]),
            facts,
        )
    return MappingProxyType(found)


def documented(owner: type[Any]) -> None:
    """Append a line for each parameter to the docstring of their class."""
    lines = [f"{each.name}: {each.facts.text}." for each in declared(owner).values()]
    owner.__doc__ = "\n    ".join((owner.__doc__ or "", *lines))


def _in_json(hint: Any) -> Any:
    """The type of a field's value in JSON, from the field's type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return Union[tuple(_in_json(each) for each in arguments)]  # noqa: UP007  of a variable
    if origin is Mapping:
        return dict[str, _in_json(arguments[1])]
    if origin is Sequence:
        return list[_in_json(arguments[0])]
    return dict[str, Any] if is_dataclass(hint) else hint


def checked_integer(name: str, value: object, low: int, high: int, advice: str) -> int:
    """`value` as an int within [low, high]. A bool is not a number here, nor is 2.0 an integer."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(cast("Any", value))
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise RequestError(
            f"{name} is {quoted(value)}, but it must be an integer from {low} to {high}. "
            f"Change it ({advice})."
        )
    return number


def checked_real(name: str, value: object, low: float, high: float, advice: str) -> float:
    """`value` as a finite float within [low, high]; a bool or a text is not a number here."""
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        number = float(cast("Any", value))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (low <= number <= high and math.isfinite(number)):
        bound = f"at least {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        raise RequestError(
            f"{name} is {quoted(value)}, but it must be a finite number {bound}. "
            f"Change it ({advice})."
        )
    return number


def checked_items(name: str, value: object, of_what: str) -> tuple[object, ...]:
    """`value` as a tuple; None is empty. Texts and mappings are not lists of things."""
    if value is None:
        return ()
    if not _is_list(value):
        raise RequestError(
            f"{name} is {quoted(value)}, which is no list. Give a list of {of_what}."
        )
    return tuple(cast("Iterable[object]", value))


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def checked_text(name: str, value: object) -> str:
    """`value` as a text of at least one character, without half of a surrogate pair."""
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{name} has {quoted(value)}, but it takes texts of at least one character. "
            "Remove that entry."
        )
    if not is_unicode(value):
        raise RequestError(
            f"{name} has {quoted(value)}, which has half of a surrogate pair, so no text has it. "
            "Remove that entry."
        )
    return value


def _checked_texts(name: str, value: object, most: int, most_chars: int) -> tuple[str, ...]:
    texts = tuple(checked_text(name, each) for each in checked_items(name, value, "texts"))
    if len(texts) > most:
        raise RequestError(f"{name} has {len(texts)} texts. Give at most {most}.")
    long = max(texts, key=len, default="")
    if len(long) > most_chars:
        raise RequestError(
            f"{name} has {quoted(long)} of {len(long)} characters. Give at most {most_chars}."
        )
    return texts


def checked_token_ids(name: str, value: object) -> tuple[int, ...]:
    """`value` as a tuple of token ids; None is empty."""
    items = checked_items(name, value, "token ids")
    return tuple(checked_integer(f"an entry of {name}", i, 0, MAX_INT, "a token id") for i in items)
