"""Interface between the scheduler and its policy, which says which group goes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from quire.plan.scheduler.sequence import SequenceGroup

__all__ = ["CountsTokens", "MayStart", "NumUncached", "Policy", "checked_key"]

MayStart = Callable[[SequenceGroup], bool]
"""Predicate: a waiting group may be admitted now; others behind it may go if it may not."""

NumUncached = Callable[[SequenceGroup], int]
"""Tokens that a waiting group would have to compute, by a look into the prefix cache."""


@runtime_checkable
class Policy(Protocol):
    """Holds the groups that wait, and gives every group a key: smaller ones are served first and
    preempted last. Keys are unique.

    The key of a group that was never admitted may change with every call of `first`. From its
    first admission on (`was_admitted`) a group keeps its key for life, preempted or not: so the
    running group with the smallest key stays that, or gives way to a smaller one, and the engine
    makes progress if no key has infinitely many below it.

    uses_priority: requests may name a priority.
    """

    uses_priority: bool

    def add(self, group: SequenceGroup) -> None:
        """A group begins to wait: a new one, or one that was preempted and keeps its key."""
        ...

    def remove(self, group: SequenceGroup) -> None:
        """A group waits no longer: it has just been admitted, or it has ended."""
        ...

    def first(self, may_start: MayStart, num_uncached: NumUncached) -> SequenceGroup | None:
        """The waiting group to admit next, with its key as of now; None if none may start."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All groups that wait, in any order."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """Additional method of a policy whose order depends on what has been computed for whom."""

    def count_tokens(self, accounts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """A step computes `tokens` [N] for groups with these `SequenceGroup.account`s [N]."""
        ...


def checked_key(key: object) -> tuple[float, int]:
    """Return a key. ValueError for what can't be compared with others."""
    parts = cast("tuple[Any, ...]", key)
    is_pair = isinstance(key, tuple) and len(parts) == 2
    if not (is_pair and all(isinstance(each, Real) for each in parts)) or math.isnan(parts[0]):
        raise ValueError(f"the key is {key!r:.80}: give (number, group.number)")
    return cast("tuple[float, int]", key)
