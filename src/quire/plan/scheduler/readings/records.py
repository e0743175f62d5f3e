"""Notes on each request's way through the scheduler, for those who ask later why it was slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.protocol.status import (
    CacheFacts,
    LoadOutcome,
    OtherRequest,
    Preemption,
    PreemptionCause,
    PromptChunk,
    RequestFacts,
    WaitReason,
)

if TYPE_CHECKING:
    from quire.plan.kv_cache import KVManager
    from quire.plan.scheduler.roster import Roster
    from quire.plan.scheduler.sequence import SequenceGroup
    from quire.plan.scheduler.table import SequenceTable
    from quire.protocol.request import EngineRequest

__all__ = [
    "MAX_CHUNKS",
    "MAX_ENDED",
    "MAX_NAMED",
    "MAX_PREEMPTIONS",
    "Record",
    "Records",
    "WaitClock",
]

Slots = npt.NDArray[np.int64]

MAX_ENDED = 1024
"""Requests that have ended and are remembered."""

MAX_NAMED = 3
"""Requests that are named of those that another one waits behind."""

MAX_CHUNKS = 64
"""Steps of a prompt that are noted one by one."""

MAX_PREEMPTIONS = 8
"""Preemptions of a request that are noted one by one."""


class WaitClock:
    """Seconds for which the queue has stood, by the reason of the last admission. A group that
    waits reads it when it comes and when it goes, so its waits cost nothing in between. now: time
    of the last plan."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds: dict[WaitReason, float] = {}

    def advance(self, now: float, reason: WaitReason | None) -> None:
        """Note the time since the last plan. reason: why groups wait; None if none does."""
        if reason is not None:
            self.seconds[reason] = self.seconds.get(reason, 0.0) + now - self.now
        self.now = now


@dataclass(slots=True, eq=False)
class Record:
    """Notes on one group; see `RequestFacts`. began_s: arrival. blocked_by: reason of the last time
    that it was blocked before its first step. mark: the clock when it came to the queue; None
    elsewhere. preempted_s: time of a preemption that it has not come back from. num_steps,
    step_rows: counts of the sequences that have left their slots."""

    request_id: str
    tenant: str
    began_s: float
    waits: dict[WaitReason, float] = field(default_factory=dict[WaitReason, float])
    blocked_by: WaitReason | None = None
    mark: dict[WaitReason, float] | None = None
    is_admitted: bool = False
    behind: tuple[OtherRequest, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_chunks: int = 0
    num_chunk_tokens: int = 0
    chunks: list[PromptChunk] = field(default_factory=list[PromptChunk])
    chunk_rows: tuple[int, int] | None = None
    num_steps: int = 0
    step_rows: tuple[int, int] | None = None
    preemptions: list[Preemption] = field(default_factory=list[Preemption])
    num_preemptions: int = 0
    preempted_s: float | None = None
    load: LoadOutcome = LoadOutcome.NONE
    cache: CacheFacts | None = None

    @classmethod
    def of(cls, request: EngineRequest, clock: WaitClock) -> Record:
        """Return the empty record of a request that arrives."""
        began_s = request.arrival_time or clock.now
        return cls(request.request_id, request.scheduling.tenant, began_s)

    @property
    def other(self) -> OtherRequest:
        """The request, as others name it."""
        return OtherRequest(self.request_id, self.tenant)

    # --- waiting --------------------------------------------------------------------------------

    def enter_queue(self, clock: WaitClock) -> None:
        """Note that it waits for admission."""
        self.mark = dict(clock.seconds)

    def came_during(self, start: float, end: float, reason: WaitReason) -> None:
        """Leave out the part of a time that was over when it arrived, once it is on the clock."""
        if self.mark is not None and (before := min(self.began_s, end) - start) > 0.0:
            self.mark[reason] = self.mark.get(reason, 0.0) + before

    def leave_queue(self, clock: WaitClock) -> None:
        """Add up what it waited for, unless that was part of a preemption."""
        if not self.is_admitted:
            self.waits = self._waits(clock)
        self.mark = None

    def _waits(self, clock: WaitClock) -> dict[WaitReason, float]:
        found = dict(self.waits)
        if self.mark is not None:
            for reason, seconds in clock.seconds.items():
                since = seconds - self.mark.get(reason, 0.0)
                if since > 0.0:
                    found[reason] = found.get(reason, 0.0) + since
        return found

    def admit(self, clock: WaitClock, cache: CacheFacts) -> None:
        """Note the first step. What nothing explains was the wait for what blocked it, or for the
        step that was under way when it came."""
        self.waits = self.waits_so_far(clock)
        self.is_admitted = True
        self.cache = replace(cache, load=self.load)

    def waits_so_far(self, clock: WaitClock) -> dict[WaitReason, float]:
        """Return its waits, as if it were admitted now."""
        found = self._waits(clock)
        rest = clock.now - self.began_s - sum(found.values())
        if rest > 0.0:
            reason = self.blocked_by or WaitReason.STEP
            found[reason] = found.get(reason, 0.0) + rest
        return found

    # --- preemptions ----------------------------------------------------------------------------

    def preempt(
        self,
        cause: PreemptionCause,
        by: OtherRequest | None,
        *,
        num_computed: int,
        num_swapped: int,
        now: float,
    ) -> None:
        """Note that it has lost its blocks."""
        self.num_preemptions += 1
        if len(self.preemptions) < MAX_PREEMPTIONS:
            at_s = max(now - self.began_s, 0.0)
            lost = Preemption(cause, by, num_computed, num_swapped, at_s=at_s)
            self.preemptions.append(lost)
            self.preempted_s = now

    def come_back(self, num_kept: int, now: float) -> None:
        """Note that it runs again. num_kept: tokens that need not be computed again."""
        if self.preempted_s is not None:
            last = self.preemptions[-1]
            self.preemptions[-1] = replace(
                last,
                num_again=max(last.num_computed - num_kept, 0),
                seconds=now - self.preempted_s,
            )
            self.preempted_s = None

    # --- steps ----------------------------------------------------------------------------------

    def count_chunk(self, num_tokens: int, num_rows: int, now: float) -> None:
        """Note a step that computes a part of the prompt. One after a preemption is not noted: it
        computes again. num_rows: rows that decode beside it."""
        if not self.num_preemptions:
            self.num_chunks += 1
            if len(self.chunks) < MAX_CHUNKS:
                at_s = max(now - self.began_s, 0.0)
                self.chunks.append(PromptChunk(at_s, num_tokens, num_rows))
            self.num_chunk_tokens += num_tokens
            self.chunk_rows = joined(self.chunk_rows, (num_rows, num_rows))

    def count_steps(self, num_steps: int, rows: tuple[int, int]) -> None:
        """Note the steps of a sequence that leaves its slot; rows: see `RequestFacts.step_rows`."""
        if num_steps:
            self.num_steps = max(self.num_steps, num_steps)
            self.step_rows = joined(self.step_rows, rows)


def joined(one: tuple[int, int] | None, other: tuple[int, int]) -> tuple[int, int]:
    """Return the fewest and the most of two ranges."""
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))


class Records:
    """The records of the groups that are here, and of the last ones that ended. A step costs a few
    array passes, and a request a few notes.

    clock: see `WaitClock`. reason: reason why the last step admitted no more groups.
    """

    def __init__(
        self,
        table: SequenceTable,
        roster: Roster,
        kv: KVManager,
    ) -> None:
        self._table = table
        self._roster = roster
        self._kv = kv
        self._ended: deque[Record] = deque(maxlen=MAX_ENDED)
        self._stands = self._is_paused = False
        self._reason = WaitReason.STEP

    def begin(self, now: float, reason: WaitReason) -> None:
        """A step is about to be planned, or somebody looks. reason: see `Admission.shortage`."""
        self._reason = reason
        if self._is_paused:
            reason = WaitReason.HELD
        clock = self._roster.clock
        start = clock.now
        clock.advance(now, reason if self._stands else None)
        if self._stands:
            for group in self._roster.newcomers:
                group.record.came_during(start, now, reason)

    def pause(self, now: float, *, is_paused: bool) -> None:
        """Note that no step is planned from now on, or that steps are planned again."""
        self.begin(now, self._reason)
        self._is_paused = is_paused
        self._stands = is_paused or len(self._roster.waiting) > 0

    def end_plan(self) -> None:
        """A step was planned, or could not be. Groups that came before it and were not admitted now
        know whom they wait behind."""
        roster = self._roster
        self._stands = len(roster.waiting) > 0
        if roster.newcomers:
            waiting = [g for g in roster.newcomers if g.record.mark is not None]
            roster.newcomers.clear()
            if waiting:
                self._note_others([g.record for g in waiting if not g.was_admitted])

    def _note_others(self, records: list[Record]) -> None:
        roster = self._roster
        holders = nlargest(MAX_NAMED, roster.running, key=self._num_blocks)
        others = tuple(dict.fromkeys(group.record.other for group in holders))
        num_running, num_waiting = len(roster.running), len(roster.waiting) - 1
        for record in records:
            if not record.behind and not record.num_running:
                record.behind = others
                record.num_running, record.num_waiting = num_running, num_waiting

    def _num_blocks(self, group: SequenceGroup) -> int:
        return sum(self._kv.num_held_blocks(each.slot) for each in group.sequences)

    def count(
        self, slots: Slots, tokens: Slots, of_prompts: npt.NDArray[np.bool_], num_prefill: int
    ) -> None:
        """Count a step that is planned, [R]. of_prompts: rows that compute parts of prompts.
        num_prefill: tokens of these."""
        table, num_rows = self._table, len(slots)
        if num_prefill:
            going_on = slots[~of_prompts]
            chunks = zip(slots[of_prompts].tolist(), tokens[of_prompts].tolist(), strict=True)
            now = self._roster.clock.now
            for slot, num_tokens in chunks:
                table.at(slot).group.record.count_chunk(num_tokens, len(going_on), now)
            slots = going_on
        table.count_steps(slots, num_rows - 1)

    def ended(self, group: SequenceGroup) -> None:
        """Keep the record of a group that has ended."""
        self._ended.append(group.record)

    # --- readings -------------------------------------------------------------------------------

    def facts(
        self, tenant: str, request_ids: Collection[str], now: float, reason: WaitReason
    ) -> tuple[RequestFacts, ...]:
        """Return the facts about requests of a tenant, oldest first. A request of several prompts
        has several. reason: see `begin`."""
        self.begin(now, reason)
        groups, wanted = dict.fromkeys(self._roster.groups.values()), frozenset(request_ids)
        found: list[RequestFacts] = []
        for record, group in chain(((each, None) for each in self._ended), _with(groups)):
            if record.tenant == tenant and record.request_id in wanted:
                found.append(self._facts(record, group, now))
        return tuple(found)

    def _facts(self, record: Record, group: SequenceGroup | None, now: float) -> RequestFacts:
        num_steps, step_rows = record.num_steps, record.step_rows
        for slot in [] if group is None else [s.slot for s in group.sequences if s.slot >= 0]:
            count, rows = self._table.steps_of(slot)
            if count:
                num_steps, step_rows = max(num_steps, count), joined(step_rows, rows)
        waits = record.waits
        if not record.is_admitted and group is not None:
            waits = record.waits_so_far(self._roster.clock)
        return RequestFacts(
            request_id=record.request_id,
            tenant=record.tenant,
            state="finished" if group is None else group.state.value,
            age_s=now - record.began_s,
            waits={reason.value: round(seconds, 6) for reason, seconds in waits.items()},
            behind=record.behind,
            num_running=record.num_running,
            num_waiting=record.num_waiting,
            num_chunks=record.num_chunks,
            num_chunk_tokens=record.num_chunk_tokens,
            chunks=tuple(record.chunks),
            chunk_rows=record.chunk_rows,
            num_steps=num_steps,
            step_rows=step_rows,
            preemptions=tuple(record.preemptions),
            num_preemptions=record.num_preemptions,
            cache=record.cache,
        )


def _with(groups: Collection[SequenceGroup]) -> Iterator[tuple[Record, SequenceGroup]]:
    return ((group.record, group) for group in groups)
