"""Groups in the order of their keys."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from quire.plan.scheduler.sequence import SequenceGroup

__all__ = ["SortedGroups", "key_of"]


def key_of(group: SequenceGroup) -> tuple[float, int]:
    """For sorting."""
    return group.key


class SortedGroups:
    """Iteration is by key, smallest first. A group's key must not change while it is in here."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def add(self, group: SequenceGroup) -> None:
        bisect.insort(self._groups, group, key=key_of)

    def discard(self, group: SequenceGroup) -> bool:
        """Take it out; whether it was in here."""
        place = bisect.bisect_left(self._groups, group.key, key=key_of)
        if place == len(self._groups) or self._groups[place] is not group:
            return False
        del self._groups[place]
        return True

    def take(self, count: int) -> list[SequenceGroup]:
        """Take out the first ones, at most `count`."""
        taken = self._groups[:count]
        del self._groups[:count]
        return taken

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)
