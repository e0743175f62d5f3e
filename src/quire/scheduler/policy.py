"""Which group goes first. A policy gives every group one key; smaller keys go first."""

from __future__ import annotations

from typing import Protocol

from quire.scheduler.sequence import SequenceGroup

__all__ = ["POLICIES", "Fcfs", "Policy"]


class Policy(Protocol):
    """Orders all candidates, running and waiting, by one key that a group keeps for its life."""

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        """Smaller is served first and preempted last. Keys are unique."""
        ...


class Fcfs:
    """First come, first served: by arrival, ties by the order of `add`."""

    def key(self, group: SequenceGroup) -> tuple[float, int]:
        return (group.request.arrival_time, group.number)


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs}
