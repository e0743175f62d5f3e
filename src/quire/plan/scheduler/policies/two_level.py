"""First come, first served in batches; shortest remaining tokens first among a few."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.plan.scheduler.policies.policy import MayStart, NumUncached
from quire.plan.scheduler.policies.priority import aged_arrival
from quire.plan.scheduler.policies.sorted_groups import SortedGroups, key_of
from quire.plan.scheduler.sequence import SequenceGroup

__all__ = ["TwoLevel"]


class TwoLevel:
    """Two-level scheduling (Woosuk Kwon's thesis, section 4.5.3 and Algorithm 2).

    Groups arrive in a queue by priority (see `aged_arrival`). When the staging queue is empty, the
    first `staging_size` move there. Among these the one with the fewest uncached tokens goes next;
    the prefix cache is asked again before each choice, since an admission may give the others
    hits. So the cost of a choice is bounded however many wait.

    Beyond the thesis: a running prompt competes with staged ones for the tokens of a step, and
    could starve behind ever new short ones. So each batch counts `tokens_per_batch` more than the
    batch before it, and a prompt with n tokens is passed by n / tokens_per_batch batches at most.
    """

    uses_priority = True

    def __init__(self, staging_size: int, tokens_per_batch: int, ageing_s: float) -> None:
        self._staging_size = staging_size
        self._tokens_per_batch = tokens_per_batch
        self._ageing_s = ageing_s
        self._arrived = SortedGroups()
        self._staged: list[SequenceGroup] = []
        self._preempted = SortedGroups()
        self._num_batches = 0

    def add(self, group: SequenceGroup) -> None:
        if group.was_admitted:
            self._preempted.add(group)
            return
        group.key = (aged_arrival(group.request, self._ageing_s), group.number)
        self._arrived.add(group)

    def remove(self, group: SequenceGroup) -> None:
        if group in self._staged:
            self._staged.remove(group)
        elif not self._preempted.discard(group):
            self._arrived.discard(group)

    def first(self, may_start: MayStart, num_uncached: NumUncached) -> SequenceGroup | None:
        if not self._staged and len(self._arrived):
            self._staged = self._arrived.take(self._staging_size)
            self._num_batches += 1
        handicap = self._num_batches * self._tokens_per_batch
        for group in self._staged:
            group.key = (float(num_uncached(group) + handicap), group.number)
        ordered = heapq.merge(self._preempted, sorted(self._staged, key=key_of), key=key_of)
        return next((group for group in ordered if may_start(group)), None)

    def __len__(self) -> int:
        return len(self._arrived) + len(self._staged) + len(self._preempted)

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._preempted
        yield from self._staged
        yield from self._arrived
