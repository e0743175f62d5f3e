"""Who waits and who runs, and what becomes of them."""

from __future__ import annotations

import bisect

import numpy as np

from quire.errors import EngineError
from quire.kv_cache import KVManager
from quire.protocol.request import FinishReason, SequenceFinish
from quire.scheduler.outputs import OutputCollector
from quire.scheduler.pins import PinnedPrefixes
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.recovery import Recovery
from quire.scheduler.sequence import GroupState, Sequence, SequenceGroup
from quire.scheduler.table import SequenceTable

__all__ = ["Roster"]


class Roster:
    """The life of every group: queued, running, preempted and queued again, ended.

    waiting, running: sorted by key. parked: open prompts that wait for their client. branching:
    running groups with samples still to branch off. groups: by handle of each live sequence.
    """

    def __init__(
        self,
        table: SequenceTable,
        kv: KVManager,
        builder: PlanBuilder,
        outputs: OutputCollector,
        recovery: Recovery,
        pins: PinnedPrefixes,
    ) -> None:
        self._table = table
        self._kv = kv
        self._builder = builder
        self._outputs = outputs
        self._recovery = recovery
        self._pins = pins
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.parked: list[SequenceGroup] = []
        self.branching: list[SequenceGroup] = []
        self.groups: dict[int, SequenceGroup] = {}
        self.preempted_total = 0

    @property
    def num_free_slots(self) -> int:
        """Slots that are neither taken nor kept for samples still to branch off."""
        reserved = sum(len(group.unborn) for group in self.branching)
        return self._table.num_free - reserved

    def queue(self, group: SequenceGroup) -> None:
        """Take in a new group. EngineError if one of its handles is in use. Of an open prompt the
        last known token is not computed, so that one token alone is nothing to do."""
        base = group.request.first_handle
        for sample in (*(s.sample_index for s in group.sequences), *group.unborn):
            if base + sample in self.groups:
                raise EngineError(f"handle {base + sample} is in use already; choose another")
            self.groups[base + sample] = group
        if group.request.is_open and len(group.sequences[0].token_ids) < 2:
            group.state = GroupState.PARKED
            self.parked.append(group)
        else:
            bisect.insort(self.waiting, group, key=lambda g: g.key)

    def wake(self, group: SequenceGroup) -> None:
        """A parked group has something to compute."""
        self.parked.remove(group)
        group.state = GroupState.WAITING
        bisect.insort(self.waiting, group, key=lambda g: g.key)

    def park(self, group: SequenceGroup) -> None:
        """A waiting group has nothing to compute before its prompt goes on."""
        self.waiting.remove(group)
        group.state = GroupState.PARKED
        self.parked.append(group)

    def park_one(self) -> bool:
        """Take the blocks of a running group that has nothing to compute before its prompt goes on,
        the last one by key; whether there was any."""
        for group in reversed(self.running):
            slot = group.sequences[0].slot
            if self._table.num_held_back[slot] and not self._table.todo()[slot]:
                self.preempt(group)
                self.park(group)
                return True
        return False

    def start_running(self, group: SequenceGroup) -> None:
        """A waiting group has got its slots and blocks."""
        self.waiting.remove(group)
        bisect.insort(self.running, group, key=lambda g: g.key)
        group.state = GroupState.RUNNING
        if group.unborn:
            self.branching.append(group)

    def abort(self, handle: int) -> None:
        """End one sequence, whatever its state; its finish leaves with the next output."""
        group = self.groups.get(handle)
        if group is None:
            return
        sample = handle - group.request.first_handle
        finish = SequenceFinish(handle, FinishReason.ABORT)
        if sample in group.unborn:
            group.unborn = tuple(i for i in group.unborn if i != sample)
            self._close(group, finish)
            return
        sequence = next(s for s in group.sequences if s.sample_index == sample)
        if group.unborn and len(group.sequences) == 1 and sequence.sample_index == sample:
            self._pass_on(group, sequence)
            self._close(group, finish)
            return
        self.finish(sequence, finish)

    def _pass_on(self, group: SequenceGroup, sequence: Sequence) -> None:
        """The only sequence so far is aborted while samples wait to branch off from it: the first
        of them takes its place. A row's random stream is fixed when it enters, so a running one
        starts again; the prefix cache gives its blocks back."""
        if sequence.slot >= 0:
            self.preempt(group)
        sequence.sample_index, *rest = group.unborn
        group.unborn = tuple(rest)

    def finish(self, sequence: Sequence, finish: SequenceFinish) -> None:
        """End one sequence and take back what it holds, but for a prefix that it pins."""
        group = sequence.group
        finish = self._pins.keep(sequence, finish)
        if sequence.slot >= 0:
            self._vacate(sequence)
        if sequence.swapped is not None:
            self._kv.discard(sequence.swapped)
            sequence.swapped = None
        sequence.num_pending = 0
        group.sequences.remove(sequence)
        self._close(group, finish)

    def _close(self, group: SequenceGroup, finish: SequenceFinish) -> None:
        """Report the end of one sequence, and drop its group when it was the last."""
        del self.groups[finish.handle]
        self._outputs.finish(finish)
        if not group.sequences:
            self._remove(group)
            group.state = GroupState.FINISHED

    def fail(self, group: SequenceGroup, message: str) -> None:
        """End all sequences of a group with an error."""
        base = group.request.first_handle
        for sample in group.unborn:
            self._close_unborn(group, sample, message)
        group.unborn = ()
        for sequence in list(group.sequences):
            handle = base + sequence.sample_index
            self.finish(sequence, SequenceFinish(handle, FinishReason.ERROR, message=message))

    def _close_unborn(self, group: SequenceGroup, sample: int, message: str) -> None:
        handle = group.request.first_handle + sample
        del self.groups[handle]
        self._outputs.finish(SequenceFinish(handle, FinishReason.ERROR, message=message))

    def _remove(self, group: SequenceGroup) -> None:
        if group.state is not GroupState.RUNNING:
            (self.waiting if group.state is GroupState.WAITING else self.parked).remove(group)
            return
        self.running.remove(group)
        if group in self.branching:
            self.branching.remove(group)

    def _vacate(self, sequence: Sequence) -> None:
        self._kv.free(sequence.slot)
        self._builder.leave(self._table.leave(sequence))

    def preempt(self, group: SequenceGroup) -> None:
        """Take all of a group's blocks; it keeps its key, and comes back as `Recovery` decides."""
        self._remove(group)
        self._recovery.save(group)
        for sequence in group.sequences:
            slot = sequence.slot
            sequence.num_pending = int(self._table.num_total[slot] - self._table.num_known[slot])
            self._vacate(sequence)
        group.state = GroupState.WAITING
        bisect.insort(self.waiting, group, key=lambda g: g.key)
        self.preempted_total += 1

    def forget_swapped(self) -> None:
        """Steps were lost, and perhaps copies to the host with them."""
        for group in (*self.waiting, *self.parked):
            self._recovery.forget(group)

    def check_invariants(self) -> None:
        """Raise EngineError if slots, blocks and queues disagree."""
        held = {s.slot for group in self.running for s in group.sequences}
        if held != set(np.flatnonzero(self._table.live).tolist()):
            raise EngineError(f"slots {sorted(held)} are held but other slots are live")
        for queue in (self.running, self.waiting):
            keys = [group.key for group in queue]
            if keys != sorted(keys):
                raise EngineError("a queue is out of order")
        if any(s.slot >= 0 for g in (*self.waiting, *self.parked) for s in g.sequences):
            raise EngineError("a waiting sequence holds a slot")
        num_used = self._kv.pool.num_used - self._pins.num_blocks + self._kv.host.num_used
        if not self.groups and (num_used or self.running or self.waiting or self.parked):
            raise EngineError("blocks or groups are left although every request has ended")
