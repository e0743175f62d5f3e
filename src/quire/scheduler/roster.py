"""Who waits and who runs, and what becomes of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from quire.errors import EngineError
from quire.kv_cache import KVManager
from quire.protocol.request import FinishReason, SequenceFinish
from quire.scheduler.outputs import OutputCollector
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.policy import Policy
from quire.scheduler.sequence import GroupState, Sequence, SequenceGroup
from quire.scheduler.table import SequenceTable

__all__ = ["Roster"]


class Roster:
    """The life of every group: queued, running, preempted and queued again, ended.

    waiting: the policy holds these. running: sorted by key. branching: running groups that may
    branch. groups: by handle of each live sequence.
    """

    def __init__(
        self,
        table: SequenceTable,
        kv: KVManager,
        builder: PlanBuilder,
        outputs: OutputCollector,
        waiting: Policy,
    ) -> None:
        self._table = table
        self._kv = kv
        self._builder = builder
        self._outputs = outputs
        self.waiting = waiting
        self.running: list[SequenceGroup] = []
        self.branching: list[SequenceGroup] = []
        self.groups: dict[int, SequenceGroup] = {}
        self.preempted_total = 0

    @property
    def num_free_slots(self) -> int:
        """Slots that are neither taken nor kept for sequences still to branch off."""
        reserved = sum(group.num_slots - len(group.sequences) for group in self.branching)
        return self._table.num_free - reserved

    def queue(self, group: SequenceGroup) -> None:
        """Take in a new group. EngineError if one of its handles is in use."""
        base = group.request.first_handle
        for sample in group.live_samples:
            if base + sample in self.groups:
                raise EngineError(f"handle {base + sample} is in use already; choose another")
            self.groups[base + sample] = group
        self.waiting.add(group)

    def start_running(self, group: SequenceGroup) -> None:
        """A waiting group has got its slots and blocks."""
        self.waiting.remove(group)
        bisect.insort(self.running, group, key=lambda g: g.key)
        group.state = GroupState.RUNNING
        if group.may_branch:
            self.branching.append(group)

    def abort(self, handle: int) -> None:
        """End one sequence, whatever its state; its finish leaves with the next output."""
        group = self.groups.get(handle)
        if group is None:
            return
        sample = handle - group.request.first_handle
        finish = SequenceFinish(handle, FinishReason.ABORT)
        if group.beams is not None:
            group.beams.wanted.remove(sample)
            if group.beams.wanted:
                self._report(finish)
            else:
                self.end_group(group, [finish])
            return
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
        """End one sequence and take back what it holds."""
        self.drop(sequence)
        self._close(sequence.group, finish)

    def drop(self, sequence: Sequence) -> None:
        """Take back what one sequence holds; its group goes on."""
        if sequence.slot >= 0:
            self._vacate(sequence)
        sequence.num_pending = 0
        sequence.group.sequences.remove(sequence)

    def end_group(self, group: SequenceGroup, finishes: Iterable[SequenceFinish]) -> None:
        """End all sequences of a group at once; `finishes` are the last words on its samples."""
        for sequence in list(group.sequences):
            self.drop(sequence)
        for finish in finishes:
            self._report(finish)
        self._remove(group)
        group.state = GroupState.FINISHED

    def _close(self, group: SequenceGroup, finish: SequenceFinish) -> None:
        """Report the end of one sequence, and drop its group when it was the last."""
        self._report(finish)
        if not group.sequences:
            self._remove(group)
            group.state = GroupState.FINISHED

    def fail(
        self, group: SequenceGroup, message: str, reason: FinishReason = FinishReason.ERROR
    ) -> None:
        """End all sequences of a group with an error."""
        base = group.request.first_handle
        finishes = [
            SequenceFinish(base + sample, reason, message=message) for sample in group.live_samples
        ]
        group.unborn = ()
        self.end_group(group, finishes)

    def _report(self, finish: SequenceFinish) -> None:
        del self.groups[finish.handle]
        self._outputs.finish(finish)

    def _remove(self, group: SequenceGroup) -> None:
        if group.state is GroupState.WAITING:
            self.waiting.remove(group)
            return
        self.running.remove(group)
        if group in self.branching:
            self.branching.remove(group)

    def _vacate(self, sequence: Sequence) -> None:
        self._kv.free(sequence.slot)
        self._builder.leave(self._table.leave(sequence))

    def preempt(self, group: SequenceGroup) -> None:
        """Take all of a group's blocks; it keeps its key and will be computed again."""
        self._remove(group)
        for sequence in group.sequences:
            slot = sequence.slot
            sequence.num_pending = int(self._table.num_total[slot] - self._table.num_known[slot])
            self._vacate(sequence)
        if group.beams is not None:
            group.beams.candidates.clear()  # each row will give its own again
        group.state = GroupState.WAITING
        self.waiting.add(group)
        self.preempted_total += 1

    def check_invariants(self) -> None:
        """Raise EngineError if slots, blocks and queues disagree."""
        held = {s.slot for group in self.running for s in group.sequences}
        if held != set(np.flatnonzero(self._table.live).tolist()):
            raise EngineError(f"slots {sorted(held)} are held but other slots are live")
        keys = [group.key for group in self.running]
        if keys != sorted(keys):
            raise EngineError("the running groups are out of order")
        waiting = {id(group) for group in self.groups.values() if group.state is GroupState.WAITING}
        if waiting != {id(group) for group in self.waiting} or len(waiting) != len(self.waiting):
            raise EngineError(f"{len(waiting)} groups wait but the policy holds others")
        if any(s.slot >= 0 for group in self.waiting for s in group.sequences):
            raise EngineError("a waiting sequence holds a slot")
        if not self.groups and (self._kv.pool.num_used or self.running or len(self.waiting)):
            raise EngineError("blocks or groups are left although every request has ended")
