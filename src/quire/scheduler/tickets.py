"""Work that takes longer than a step, and who waits for it."""

from __future__ import annotations

from quire.scheduler.sequence import SequenceGroup

__all__ = ["Tickets"]


class Tickets:
    """Numbers the pieces of work that groups are blocked on. A number is never used again, so that
    late news of work that nobody waits for any more finds no stranger."""

    def __init__(self) -> None:
        self._next = 0
        self._groups: dict[int, SequenceGroup] = {}

    def start(self, group: SequenceGroup) -> int:
        """A new ticket, on which the group is blocked."""
        ticket, self._next = self._next, self._next + 1
        self._groups[ticket] = group
        group.blocked_on.add(ticket)
        return ticket

    def end(self, ticket: int) -> SequenceGroup | None:
        """The work has ended: the group that waited for it, if it still does."""
        group = self._groups.pop(ticket, None)
        if group is not None:
            group.blocked_on.discard(ticket)
        return group

    def forget(self, group: SequenceGroup) -> None:
        """The group waits for nothing any more."""
        for ticket in group.blocked_on:
            del self._groups[ticket]
        group.blocked_on.clear()
