"""The simplest kind of policy: a key that is known on arrival."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from quire.plan.scheduler.policies.policy import MayStart, NumUncached, checked_key
from quire.plan.scheduler.policies.sorted_groups import SortedGroups
from quire.plan.scheduler.sequence import SequenceGroup

__all__ = ["KeyedPolicy"]


class KeyedPolicy(ABC):
    """Subclasses define `key`, and set `uses_priority` if it looks at priorities."""

    uses_priority = False

    def __init__(self) -> None:
        self._waiting = SortedGroups()

    @abstractmethod
    def key(self, group: SequenceGroup) -> tuple[float, int]:
        """Return the key of a new group. Smaller goes first; `group.number` as second part makes it
        unique."""

    def add(self, group: SequenceGroup) -> None:
        if not group.was_admitted:
            group.key = checked_key(self.key(group))
        self._waiting.add(group)

    def remove(self, group: SequenceGroup) -> None:
        self._waiting.discard(group)

    def first(self, may_start: MayStart, num_uncached: NumUncached) -> SequenceGroup | None:
        del num_uncached  # the key does not depend on it
        return next((group for group in self._waiting if may_start(group)), None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._waiting)
