"""Groups by their state: waiting, blocked, running."""

from __future__ import annotations

import bisect

from quire.base.errors import EngineError
from quire.plan.scheduler.policies.spare import SpareLast
from quire.plan.scheduler.readings.records import WaitClock
from quire.plan.scheduler.sequence import GroupState, SequenceGroup

__all__ = ["Roster"]


class Roster:
    """Knows which groups are in which state; `Lifecycle` gives and takes slots and blocks. waiting:
    groups held by the policy. running: groups sorted by key. blocked: groups that wait for tickets,
    some of them with slots. branching: groups with slots that may branch. arriving: running groups
    whose prompts were open when they began to run. groups: group of each live
    sequence, by handle. clock: times of waits. newcomers: groups that came to the queue since
    somebody emptied the list."""

    def __init__(self, waiting: SpareLast) -> None:
        self.waiting = waiting
        self.running: list[SequenceGroup] = []
        self.blocked: list[SequenceGroup] = []
        self.branching: list[SequenceGroup] = []
        self.arriving: list[SequenceGroup] = []
        self.groups: dict[int, SequenceGroup] = {}
        self.clock = WaitClock()
        self.newcomers: list[SequenceGroup] = []

    @property
    def num_reserved_slots(self) -> int:
        """Slots for sequences still to branch off from those that have slots."""
        return sum(group.num_slots - len(group.sequences) for group in self.branching)

    @property
    def progressing(self) -> list[SequenceGroup]:
        """Groups that run, or will when their K/V have come in: others get their blocks then."""
        return [*self.running, *(group for group in self.blocked if group.is_coming_in)]

    def add(self, group: SequenceGroup) -> None:
        """Take in a new group. EngineError if one of its handles is in use."""
        base = group.request.first_handle
        for sample in group.live_samples:
            if base + sample in self.groups:
                raise EngineError(f"handle {base + sample} is in use already; choose another")
            self.groups[base + sample] = group
        if group.blocked_on:
            self._block(group)
        else:
            self._wait(group)

    def wait(self, group: SequenceGroup) -> None:
        """Move a group to the queue."""
        self._remove(group)
        self._wait(group)

    def block(self, group: SequenceGroup) -> None:
        """Move a group that cannot go on before its tickets have ended out of the way."""
        self._remove(group)
        self._block(group)

    def run(self, group: SequenceGroup) -> None:
        """Move a group that has slots and blocks to the running ones."""
        self._remove(group)
        bisect.insort(self.running, group, key=lambda g: g.key)
        group.state = GroupState.RUNNING
        self._reserve(group)
        if group.request.is_open:
            self.arriving.append(group)

    def end(self, group: SequenceGroup) -> None:
        """Take out a group whose sequences have all ended."""
        self._remove(group)
        group.state = GroupState.FINISHED

    def end_sequence(self, handle: int) -> None:
        """Forget the handle of a sequence that has ended."""
        del self.groups[handle]

    def settle_branching(self) -> None:
        """Release reserved slots of groups that will not branch any more."""
        self.branching = [group for group in self.branching if group.may_branch]

    def _wait(self, group: SequenceGroup) -> None:
        group.state = GroupState.WAITING
        group.record.enter_queue(self.clock)
        self.newcomers.append(group)
        self.waiting.add(group)

    def _block(self, group: SequenceGroup) -> None:
        group.state = GroupState.BLOCKED
        group.record.blocked_by = group.blocked_by
        self.blocked.append(group)
        if group.has_slots:
            self._reserve(group)

    def _reserve(self, group: SequenceGroup) -> None:
        if group.may_branch:
            self.branching.append(group)

    def _remove(self, group: SequenceGroup) -> None:
        if group.state is GroupState.WAITING:
            group.record.leave_queue(self.clock)
            self.waiting.remove(group)
            return
        (self.running if group.state is GroupState.RUNNING else self.blocked).remove(group)
        for some in (self.branching, self.arriving):
            if group in some:
                some.remove(group)

    def check_invariants(self) -> None:
        """Raise EngineError if the lists disagree with each other or are out of order."""
        keys = [group.key for group in self.running]
        if keys != sorted(keys):
            raise EngineError("the running groups are out of order")
        waiting = {id(group) for group in self.groups.values() if group.state is GroupState.WAITING}
        if waiting != {id(group) for group in self.waiting} or len(waiting) != len(self.waiting):
            raise EngineError(f"{len(waiting)} groups wait but the policy holds others")
        if any(group.has_slots for group in self.waiting):
            raise EngineError("a waiting sequence holds a slot")
        if any(bool(g.blocked_on) != (g.state is GroupState.BLOCKED) for g in self.groups.values()):
            raise EngineError("a group is blocked on nothing, or has tickets but is not blocked")
        if not self.groups and (self.running or len(self.waiting) or self.blocked):
            raise EngineError("groups are left although every request has ended")
