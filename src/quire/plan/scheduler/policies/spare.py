"""Work on spare capacity, behind every policy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from quire.plan.scheduler.policies.policy import CountsTokens, MayStart, NumUncached, Policy
from quire.plan.scheduler.policies.sorted_groups import SortedGroups
from quire.plan.scheduler.sequence import SequenceGroup

__all__ = ["SPARE_ACCOUNT", "SpareLast"]

SPARE_ACCOUNT = -1
"""`SequenceGroup.account` of groups that the policy knows nothing of."""


class SpareLast:
    """Another policy, with the spare groups (`SchedulingParams.is_spare`) behind all of its own:
    they are admitted only while none of these wait, by arrival, and preempted first, the newest of
    them at first.

    is_held: nobody may start but who was admitted before. Spare groups then need not wait for
    others, which may be kept out for as long as these have not ended."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._spare = SortedGroups()
        self.uses_priority = policy.uses_priority
        self.is_held = False

    def add(self, group: SequenceGroup) -> None:
        if not group.is_spare:
            self._policy.add(group)
            return
        group.key, group.account = (math.inf, group.number), SPARE_ACCOUNT
        self._spare.add(group)

    def remove(self, group: SequenceGroup) -> None:
        if group.is_spare:
            self._spare.discard(group)
        else:
            self._policy.remove(group)

    def first(self, may_start: MayStart, num_uncached: NumUncached) -> SequenceGroup | None:
        """See `Policy.first`. While `is_held`, one that was admitted before."""
        if self.num_urgent:
            found = self._policy.first(self._unless_held(may_start), num_uncached)
            if found is not None or not self.is_held:
                return found
        return next(filter(self._unless_held(may_start), self._spare), None)

    def _unless_held(self, may_start: MayStart) -> MayStart:
        if not self.is_held:
            return may_start
        return lambda group: group.was_admitted and may_start(group)

    @property
    def num_urgent(self) -> int:
        """Groups that wait and are not spare."""
        return len(self._policy)

    @property
    def num_spare(self) -> int:
        """Groups that wait and are spare."""
        return len(self._spare)

    def count_tokens(self, accounts: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Count tokens, if the policy does so; those of spare groups are nobody's."""
        if isinstance(self._policy, CountsTokens):
            urgent = accounts != SPARE_ACCOUNT
            self._policy.count_tokens(accounts[urgent], tokens[urgent])

    def __len__(self) -> int:
        return len(self._policy) + len(self._spare)

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._policy
        yield from self._spare
