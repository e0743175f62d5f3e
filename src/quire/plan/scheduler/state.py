"""Everything that one scheduler knows, in one object that its parts share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.base.telemetry.flight.record import EventKind, FlightRecorder
from quire.plan.kv_cache import KVManager
from quire.plan.scheduler.constraints.unsent import UnsentTokens
from quire.plan.scheduler.deadlines import Deadlines, PrefillSpeed
from quire.plan.scheduler.outputs import OutputCollector
from quire.plan.scheduler.pins import PinnedPrefixes
from quire.plan.scheduler.plan_builder import PlanBuilder
from quire.plan.scheduler.policies.spare import SpareLast
from quire.plan.scheduler.prefix import PrefixCache
from quire.plan.scheduler.readings.records import Records
from quire.plan.scheduler.recovery import Recovery
from quire.plan.scheduler.roster import Roster
from quire.plan.scheduler.sequence import SequenceGroup
from quire.plan.scheduler.states.kept import KeptStates
from quire.plan.scheduler.table import SequenceTable

__all__ = ["SchedulerState", "Tickets"]


class Tickets:
    """Numbers the pieces of work that block groups. A number is never used again, so late news of
    abandoned work cannot reach another group."""

    def __init__(self, numbers: Iterator[int], flight: FlightRecorder) -> None:
        """numbers: never used before. flight: is told who waits for what."""
        self._numbers = numbers
        self._flight = flight
        self._groups: dict[int, list[SequenceGroup]] = {}

    def __len__(self) -> int:
        """Return the number of tickets that some group is blocked on."""
        return len(self._groups)

    def start(self, group: SequenceGroup, what: str) -> int:
        """A new ticket, on which the group is blocked. what: names the work."""
        ticket = next(self._numbers)
        self.join(ticket, group, what)
        return ticket

    def join(self, ticket: int, group: SequenceGroup, what: str) -> None:
        """Block a group on work that was started before."""
        self._groups.setdefault(ticket, []).append(group)
        group.blocked_on.add(ticket)
        self._flight.event(EventKind.BLOCKED, group.request.first_handle, ticket, what)

    def group_of(self, ticket: int) -> SequenceGroup | None:
        """The group that is blocked on it, if any still is."""
        groups = self._groups.get(ticket)
        return groups[0] if groups else None

    def end(self, ticket: int) -> list[SequenceGroup]:
        """End a piece of work; return the groups that were blocked on it, if any still are."""
        groups = self._groups.pop(ticket, [])
        for group in groups:
            group.blocked_on.discard(ticket)
            self._flight.event(EventKind.UNBLOCKED, group.request.first_handle, ticket)
        return groups

    def leave(self, ticket: int, group: SequenceGroup) -> None:
        """The group waits for this work no longer; others may."""
        groups = self._groups[ticket]
        groups.remove(group)
        if not groups:
            del self._groups[ticket]
        group.blocked_on.discard(ticket)
        self._flight.event(EventKind.UNBLOCKED, group.request.first_handle, ticket)

    def forget(self, group: SequenceGroup) -> None:
        """The group waits for nothing any more."""
        for ticket in list(group.blocked_on):
            self.leave(ticket, group)


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The parts never change; each changes what it holds through its own methods.

    table: running sequences, by slot. kv: their blocks. roster: groups by state. builder: changes
    for the next plan. outputs: news for clients. prefixes, pins: cached and pinned K/V. states:
    keeper of recurrent states, None if none are kept. recovery: way back of preempted groups.
    tickets: tickets that groups are blocked on. deadlines, speed: tell which requests come too
    late. unsent: tokens that wait for verdicts. records: notes on the way of each group. flight:
    log of steps and of what becomes of requests.
    """

    kv: KVManager
    table: SequenceTable
    roster: Roster
    builder: PlanBuilder
    pins: PinnedPrefixes
    prefixes: PrefixCache
    states: KeptStates | None
    recovery: Recovery
    deadlines: Deadlines
    outputs: OutputCollector
    unsent: UnsentTokens
    tickets: Tickets
    records: Records
    flight: FlightRecorder
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)

    @property
    def waiting(self) -> SpareLast:
        """Groups that wait to be admitted."""
        return self.roster.waiting

    @property
    def num_free_slots(self) -> int:
        """Slots that are neither taken nor reserved for sequences still to branch off."""
        return self.table.num_free - self.roster.num_reserved_slots
