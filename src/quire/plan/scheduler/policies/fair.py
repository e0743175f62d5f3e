"""Equal shares of computed tokens for tenants, or shares by their weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from quire.plan.scheduler.policies.policy import MayStart, NumUncached
from quire.plan.scheduler.policies.sorted_groups import SortedGroups, key_of
from quire.plan.scheduler.sequence import SequenceGroup

__all__ = ["Fair"]


class Fair:
    """Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

    Each tenant has a counter of the tokens that the engine has computed for it, prompt and output,
    divided by its weight. The tenant with the smallest counter goes next, its own requests by
    arrival. A tenant that comes back after it had nothing waiting is lifted to where the others
    are: time in which it asked for nothing gives no credit.
    """

    uses_priority = False

    def __init__(self) -> None:
        self._accounts: dict[str, int] = {}
        self._counters = np.zeros(1)
        self._weights = np.ones(1)
        self._queues: dict[int, deque[SequenceGroup]] = {}
        self._preempted = SortedGroups()
        self._level = 0.0  # highest counter from which a group was admitted
        self._num_new = 0

    def add(self, group: SequenceGroup) -> None:
        if group.was_admitted:
            self._preempted.add(group)
            return
        account = self._account_of(group)
        if account not in self._queues:
            self._queues[account] = deque()
            self._counters[account] = max(self._counters[account], self._level)
        self._queues[account].append(group)
        self._num_new += 1

    def _account_of(self, group: SequenceGroup) -> int:
        """Number of the tenant's account. Its weight is what its latest request says."""
        asked = group.request.scheduling
        account = self._accounts.setdefault(asked.tenant, len(self._accounts))
        if account == len(self._counters):
            self._counters = np.append(self._counters, np.zeros(account))
            self._weights = np.append(self._weights, np.ones(account))
        self._weights[account] = asked.weight
        group.account = account
        return account

    def remove(self, group: SequenceGroup) -> None:
        queue = self._queues.get(group.account)
        if queue is None or group not in queue:
            self._preempted.discard(group)
            return
        queue.remove(group)
        self._num_new -= 1
        if not queue:
            del self._queues[group.account]
        if group.was_admitted:
            self._level = max(self._level, group.key[0])

    def first(self, may_start: MayStart, num_uncached: NumUncached) -> SequenceGroup | None:
        del num_uncached  # what is cached costs nothing and is not charged
        found = [next(filter(may_start, self._preempted), None), self._first_new(may_start)]
        return min((group for group in found if group is not None), key=key_of, default=None)

    def _first_new(self, may_start: MayStart) -> SequenceGroup | None:
        for account in sorted(self._queues, key=self._counters.item):
            for group in self._queues[account]:
                group.key = (self._counters.item(account), group.number)
                if may_start(group):
                    return group
        return None

    def count_tokens(self, accounts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Count tokens, as `CountsTokens` describes."""
        computed = np.bincount(accounts, tokens, len(self._counters))
        self._counters += computed / self._weights

    def __len__(self) -> int:
        return self._num_new + len(self._preempted)

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._preempted
        for queue in self._queues.values():
            yield from queue
