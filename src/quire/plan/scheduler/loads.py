"""Fetches prefixes that sources hold, before the groups that start with them are admitted."""

from __future__ import annotations

from quire.plan.kv_cache import ELSEWHERE
from quire.plan.kv_cache.notices import BlockName
from quire.plan.scheduler.allocation import Allocation
from quire.plan.scheduler.lifecycle import Lifecycle
from quire.plan.scheduler.sequence import SequenceGroup
from quire.plan.scheduler.state import SchedulerState
from quire.protocol.recovery import RecoveryCosts
from quire.protocol.status import LoadOutcome

__all__ = ["LOAD_SECONDS", "Loads"]

LOAD_SECONDS = 2.0
"""A load may take so long, and `SECONDS_PER_TOKEN` more for each token that it saves (the values
are those of SGLang's hierarchical cache)."""

SECONDS_PER_TOKEN = 0.1 / 1024


class Loads:
    """Blocks a waiting group on loads, once before each admission. They fill blocks that are
    published when they have arrived, and then the group finds them as any prefix. It computes what
    has not come by the deadline.

    late_total: groups that did not wait to the end. started_total: groups that something was
    loaded for. declined_total: groups that computed what could have been loaded, since that was
    cheaper.
    """

    def __init__(
        self,
        state: SchedulerState,
        lifecycle: Lifecycle,
        allocation: Allocation,
        costs: RecoveryCosts | None,
        seconds: float,
    ) -> None:
        """costs: costs and savings of a load; None loads all that there is. seconds: see
        `LOAD_SECONDS`."""
        self._state = state
        self._lifecycle = lifecycle
        self._allocation = allocation
        self._costs = costs
        self._seconds = seconds
        self._waiting: dict[SequenceGroup, tuple[float, set[int]]] = {}  # deadline, tickets
        self.late_total = self.started_total = self.declined_total = 0

    def start(self, group: SequenceGroup, now: float) -> bool:
        """Load what sources hold of a waiting group beyond its cached prefixes, if that pays and
        there is room. What is on its way for another group is not loaded twice. Return whether the
        group is blocked."""
        state, sources = self._state, self._state.kv.sources
        if not sources or group.was_fetched or group.sequences[0].swapped is not None:
            return False
        if len(self._waiting) >= state.num_free_slots:
            return False  # the blocks would be evicted again before all groups are admitted
        num_saved, wanted, kept, states = self._find(group)
        fresh = [name for name in wanted if sources.ticket_of(name) is None]
        if not wanted and not states:
            return False
        near, far = parts = sources.parts(fresh)
        disk = state.kv.disk_states
        new_states = [] if disk is None else [s for s in states if disk.ticket_of(s) is None]
        num_far = len(far) * sources.has_bytes
        num_far += 0 if disk is None else len(new_states) * disk.num_parts
        if not self._pays(num_saved, len(near), num_far):
            self.declined_total += 1
            group.record.load = LoadOutcome.DECLINED
            group.was_fetched = True
            sources.declined()
            return False
        if fresh and not self._allocation.has_room(len(fresh) + state.kv.pool.num_unused(kept)):
            return False
        if disk is not None and not disk.has_room(len(new_states)):
            return False
        tickets = {ticket for name in wanted if (ticket := sources.ticket_of(name)) is not None}
        if disk is not None:
            tickets |= {ticket for s in states if (ticket := disk.ticket_of(s)) is not None}
        for ticket in tickets:
            state.tickets.join(ticket, group, "K/V of its prompt")
        state.prefixes.tell_tokens(group)
        for part in filter(None, parts):
            tickets.add(ticket := state.tickets.start(group, "K/V of its prompt"))
            sources.load(part, kept, ticket)
        if disk is not None:
            for each in new_states:
                tickets.add(ticket := state.tickets.start(group, "K/V of its prompt"))
                disk.load(each, ticket)
        self.started_total += bool(fresh or new_states)
        self._waiting[group] = (now + self._seconds + SECONDS_PER_TOKEN * num_saved, tickets)
        group.was_fetched = True
        return True

    def _find(self, group: SequenceGroup) -> tuple[int, list[BlockName], list[int], list[bytes]]:
        """Return the tokens that a group need not compute after a load, the blocks to load, the
        device blocks before and among them, and the names of states to load."""
        num_saved, size = 0, self._state.kv.block_size
        states = dict[bytes, None]()
        wanted, kept = dict[BlockName, None](), dict[int, None]()
        for sequence in group.sequences:
            hit = self._state.prefixes.lookup(sequence)
            whole = self._state.prefixes.lookup_all(sequence)
            if whole.num_tokens <= hit.num_tokens:
                continue
            num_saved += whole.num_tokens - hit.num_tokens
            names = self._state.kv.all_prefixes.names_of(whole, ELSEWHERE, sequence.names)
            wanted.update(dict.fromkeys(names))
            blocks = [b for row in whole.blocks for b in row if b is not None and b != ELSEWHERE]
            kept.update(dict.fromkeys(blocks))
            if whole.checkpoint == ELSEWHERE:
                states[sequence.names[whole.num_tokens // size - 1]] = None
        return num_saved, list(wanted), list(kept), list(states)

    def _pays(self, num_tokens: int, num_near: int, num_far: int) -> bool:
        """Return whether loads of blocks, some of them on the disk, beat computing `num_tokens`.
        What nobody has measured yet pays."""
        seconds = self._state.kv.sources.seconds_to_load(num_far)
        if self._costs is not None:
            seconds += num_near * self._costs.seconds_per_block
            return seconds < num_tokens * self._costs.seconds_per_token
        speed = self._state.speed.last_known
        return not speed or seconds < num_tokens / speed

    def expire(self, now: float) -> None:
        """Let groups go on whose loads are late. The loads keep their blocks until they end."""
        for group, (deadline, tickets) in list(self._waiting.items()):
            under_way = tickets & group.blocked_on
            if not under_way:
                del self._waiting[group]
            elif deadline <= now:
                del self._waiting[group]
                self.late_total += 1
                group.record.load = LoadOutcome.LATE
                self._state.kv.sources.late(under_way)
                self._lifecycle.stop_waiting(group, under_way)
