"""The parts of an answer, in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CallArguments", "CallStart", "Part", "Reasoning", "Text"]


@dataclass(frozen=True, slots=True)
class Text:
    """The next characters of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next characters of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. index: 0, 1, 2, … within the answer. id: call id in the family's form."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next characters of the JSON text of a call's arguments. All of a call's together are one
    object, `{}` if the model wrote none."""

    index: int
    text: str


Part = Text | Reasoning | CallStart | CallArguments
