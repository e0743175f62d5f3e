"""Fetches prefixes that sources hold, before the groups that start with them are admitted."""

from __future__ import annotations

from quire.kv_cache.sources import ELSEWHERE
from quire.protocol.recovery import RecoveryCosts
from quire.scheduler.allocation import Allocation
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.sequence import SequenceGroup
from quire.scheduler.state import SchedulerState

__all__ = ["LOAD_SECONDS", "Loads"]

LOAD_SECONDS = 2.0
"""A load may take so long, and `SECONDS_PER_TOKEN` more for each token that it saves (the values
are those of SGLang's hierarchical cache)."""

SECONDS_PER_TOKEN = 0.1 / 1024


class Loads:
    """Blocks a waiting group on the ticket of a load, once before each admission. The load fills
    blocks that are published when they have arrived, and then the group finds them as any prefix.
    It computes what has not come by the deadline.

    late_total: loads that a group did not wait for any longer.
    """

    def __init__(
        self,
        state: SchedulerState,
        lifecycle: Lifecycle,
        allocation: Allocation,
        costs: RecoveryCosts | None,
        seconds: float,
    ) -> None:
        """costs: what a load costs, and what it saves; None loads all that there is. seconds: see
        `LOAD_SECONDS`."""
        self._state = state
        self._lifecycle = lifecycle
        self._allocation = allocation
        self._costs = costs
        self._seconds = seconds
        self._deadlines: dict[int, float] = {}  # by ticket
        self.late_total = 0

    def start(self, group: SequenceGroup, now: float) -> bool:
        """Load what sources hold of a waiting group beyond its cached prefixes, if that pays and
        there is room. Return whether the group is blocked on it."""
        state, sources = self._state, self._state.kv.sources
        if not sources or group.was_fetched or group.sequences[0].swapped is not None:
            return False
        if len(self._deadlines) >= state.num_free_slots:
            return False  # the blocks would be evicted again before all groups are admitted
        num_saved = 0
        wanted, kept = dict[tuple[int, bytes], None](), dict[int, None]()
        for sequence in group.sequences:
            hit, whole = state.prefixes.lookup(sequence), state.prefixes.lookup_all(sequence)
            if whole.num_tokens <= hit.num_tokens:
                continue
            num_saved += whole.num_tokens - hit.num_tokens
            names = state.kv.all_prefixes.names_of(whole, ELSEWHERE, sequence.names)
            wanted.update(dict.fromkeys(names))
            blocks = [b for row in whole.blocks for b in row if b is not None and b != ELSEWHERE]
            kept.update(dict.fromkeys(blocks))
        if not wanted or not self._pays(num_saved, len(wanted)):
            return False
        if not self._allocation.has_room(len(wanted) + state.kv.pool.num_unused(kept)):
            return False
        ticket = state.tickets.start(group)
        sources.load(list(wanted), list(kept), ticket)
        self._deadlines[ticket] = now + self._seconds + SECONDS_PER_TOKEN * num_saved
        group.was_fetched = True
        return True

    def _pays(self, num_tokens: int, num_blocks: int) -> bool:
        return self._costs is None or self._costs.prefers_load(num_tokens, num_blocks)

    def expire(self, now: float) -> None:
        """Let groups go on whose loads are late. The loads keep their blocks until they end."""
        if not self._deadlines:
            return
        for ticket, deadline in list(self._deadlines.items()):
            if self._state.tickets.group_of(ticket) is None:
                del self._deadlines[ticket]
            elif deadline <= now:
                del self._deadlines[ticket]
                self.late_total += 1
                self._lifecycle.stop_waiting(ticket)
