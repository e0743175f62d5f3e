"""First come, first served."""

from __future__ import annotations

from quire.plan.scheduler.policies.keyed import KeyedPolicy
from quire.plan.scheduler.sequence import SequenceGroup

__all__ = ["Fcfs"]


class Fcfs(KeyedPolicy):
    """Orders by arrival, ties by the order of `add`."""

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        return (group.request.arrival_time, group.number)
