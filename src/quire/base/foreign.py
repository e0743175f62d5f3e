"""Names that users of other engines bring along and that have no counterpart here: most ask for
what is so anyway, and a sentence explains the others."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

from quire.base.errors import quoted

__all__ = ["ForeignName", "check_foreign", "explaining", "missing_attribute", "nearest", "shown"]

T = TypeVar("T")

_NEAR = 0.75
"""Names less alike than this (of 1) are no help."""


@dataclass(frozen=True, slots=True)
class ForeignName:
    """A setting, parameter or argument without a counterpart.

    reason: why it is not needed, or the part that is missing. neutral: values that change nothing,
    as text in lower case; None: all values. always: it cannot be turned off; advice instead, or
    empty. is_told: users are told that it has no effect.
    """

    reason: str
    neutral: tuple[str, ...] | None = ()
    always: str | None = None
    is_told: bool = False

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether this value changes nothing here."""
        if value is None:
            return True
        if value is False and self.always is not None:
            return False
        if self.neutral is None or value is False:
            return True
        if isinstance(value, Sized) and not len(value):
            return True
        return str(value).lower() in self.neutral

    def is_told_of(self, value: object) -> bool:
        """Return whether who gives this value is to be told that it has no effect."""
        if isinstance(value, Mapping):
            value = any(cast("Mapping[str, object]", value).values())
        return self.is_told and bool(value)

    def refusal(self, shown: str) -> str:
        """A sentence on `shown`, which names it and its value."""
        advice = "" if self.always is None else f"; {self.always or 'leave it out'}"
        return f"{shown} cannot be served: {self.reason}{advice}."


def shown(name: str, value: object) -> str:
    """`name=value`, the value cut where it is long."""
    return f"{name}={quoted(value)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None if none is near. Of those that are, one with as
    many words comes first: a word is cut short or misspelt more often than left out."""
    near = difflib.get_close_matches(name, list(known), cutoff=_NEAR)
    alike = [each for each in near if _num_words(each) == _num_words(name)]
    return next(iter((*alike, *near)), None)


def _num_words(name: str) -> int:
    return len(re.findall(r"[^-_.]+", name))


def check_foreign(
    error: type[Exception], what: str, foreign: Mapping[str, ForeignName], given: Mapping[str, Any]
) -> None:
    """Pass over names that ask for nothing, and raise `error` with a sentence on any other. what:
    takes them ("generate")."""
    for name, value in given.items():
        if name not in foreign:
            raise error(f"{what} takes no {shown(name, value)}. Leave it out; help() lists all.")
        if not foreign[name].asks_for_nothing(value):
            raise error(foreign[name].refusal(shown(name, value)))


def missing_attribute(owner: str, name: str, reasons: Mapping[str, str]) -> AttributeError:
    """The error for `name`, which `owner` lacks, with the reason where it is known."""
    plain = f"{owner} has no attribute {name!r}"
    return AttributeError(f"{plain}: {reasons[name]}" if name in reasons else plain)


def explaining(
    error: type[Exception], what: str, foreign: Mapping[str, ForeignName]
) -> Callable[[type[T]], type[T]]:
    """Return a decorator of frozen dataclasses. It ignores names that are no field where they ask
    for nothing, and else refuses them in a sentence, and a change of a field too.

    error: type to raise. what: kind of the names ("a sampling parameter"). A field's metadata may
    have `others`: names of the same thing elsewhere.
    """

    def decorate(kind: type[T]) -> type[T]:
        target: Any = kind
        items = dataclasses.fields(target)
        names = [item.name for item in items]
        others = {other: item.name for item in items for other in item.metadata.get("others", ())}
        plain_init = target.__init__

        @functools.wraps(plain_init)
        def init(self: T, *args: Any, **given: Any) -> None:
            for name in given.keys() - set(names):
                check(name, given.pop(name))
            plain_init(self, *args, **given)

        def check(name: str, value: object) -> None:
            if name not in foreign:
                near = others.get(name) or nearest(name, names)
                advice = f"Did you mean {near}? Leave it out" if near else "Leave it out"
                advice += f"; help({kind.__name__}) lists them."
                raise error(f"{shown(name, value)} is not {what}. {advice}")
            if not foreign[name].asks_for_nothing(value):
                raise error(foreign[name].refusal(shown(name, value)))

        def refuse_change(_self: T, name: str, _value: object) -> NoReturn:
            raise dataclasses.FrozenInstanceError(
                f"{kind.__name__} objects do not change, since requests share them: use "
                f"dataclasses.replace(params, {name}=…), or params.clone({name}=…)"
            )

        target.__init__, target.__setattr__ = init, refuse_change
        return kind

    return decorate
