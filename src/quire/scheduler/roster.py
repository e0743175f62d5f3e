"""Who waits and who runs, and what becomes of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from quire.errors import EngineError
from quire.kv_cache import KVManager
from quire.protocol.request import FinishReason, SequenceFinish
from quire.scheduler.outputs import OutputCollector
from quire.scheduler.pins import PinnedPrefixes
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.policy import Policy
from quire.scheduler.recovery import Recovery
from quire.scheduler.sequence import GroupState, Sequence, SequenceGroup
from quire.scheduler.table import SequenceTable

__all__ = ["Roster"]


class Roster:
    """The life of every group: queued, running, preempted and queued again, ended.

    waiting: the policy holds these. running: sorted by key. parked: open prompts that wait for
    their client. branching: running groups that may branch. groups: by handle of each live
    sequence.
    """

    def __init__(
        self,
        table: SequenceTable,
        kv: KVManager,
        builder: PlanBuilder,
        outputs: OutputCollector,
        waiting: Policy,
        recovery: Recovery,
        pins: PinnedPrefixes,
    ) -> None:
        self._table = table
        self._kv = kv
        self._builder = builder
        self._outputs = outputs
        self.waiting = waiting
        self._recovery = recovery
        self._pins = pins
        self.running: list[SequenceGroup] = []
        self.parked: list[SequenceGroup] = []
        self.branching: list[SequenceGroup] = []
        self.groups: dict[int, SequenceGroup] = {}
        self.preempted_total = 0

    @property
    def num_free_slots(self) -> int:
        """Slots that are neither taken nor kept for sequences still to branch off."""
        reserved = sum(group.num_slots - len(group.sequences) for group in self.branching)
        return self._table.num_free - reserved

    def queue(self, group: SequenceGroup) -> None:
        """Take in a new group. EngineError if one of its handles is in use. Of an open prompt the
        last known token is not computed, so that one token alone is nothing to do."""
        base = group.request.first_handle
        for sample in group.live_samples:
            if base + sample in self.groups:
                raise EngineError(f"handle {base + sample} is in use already; choose another")
            self.groups[base + sample] = group
        if group.request.is_open and len(group.sequences[0].token_ids) < 2:
            group.state = GroupState.PARKED
            self.parked.append(group)
        else:
            self.waiting.add(group)

    def wake(self, group: SequenceGroup) -> None:
        """A parked group has something to compute."""
        self.parked.remove(group)
        group.state = GroupState.WAITING
        self.waiting.add(group)

    def park(self, group: SequenceGroup) -> None:
        """A waiting group has nothing to compute before its prompt goes on."""
        self.waiting.remove(group)
        group.state = GroupState.PARKED
        self.parked.append(group)

    def park_one(self) -> bool:
        """Take the blocks of a running group that has nothing to compute before its prompt goes on,
        the last one by key; whether there was any."""
        if not self._table.num_held_back.any():
            return False
        for group in reversed(self.running):
            slot = group.sequences[0].slot
            if self._table.num_held_back[slot] and not self._table.todo()[slot]:
                self.preempt(group)
                self.park(group)
                return True
        return False

    def free_idle(self, *, is_last_resort: bool) -> bool:
        """Take blocks from who does not compute; of pins only `is_last_resort`. Whether there was
        anyone."""
        return self.park_one() or (is_last_resort and self._pins.release_one())

    def make_room(self) -> None:
        """Take blocks from someone, so that a running group can grow: from who does not compute, or
        else from the last running group by key."""
        if not self.free_idle(is_last_resort=len(self.running) == 1):
            self.preempt(self.running[-1])

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
        """End one sequence and take back what it holds, but for a prefix that it pins."""
        finish = self._pins.keep(sequence, finish)
        self.drop(sequence)
        self._close(sequence.group, finish)

    def drop(self, sequence: Sequence) -> None:
        """Take back what one sequence holds; its group goes on."""
        if sequence.slot >= 0:
            self._vacate(sequence)
        if sequence.swapped is not None:
            self._kv.swaps.discard(sequence.swapped)
            sequence.swapped = None
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
        self,
        group: SequenceGroup,
        message: str,
        reason: FinishReason = FinishReason.ERROR,
        *,
        is_request_fault: bool = False,
    ) -> None:
        """End all sequences of a group with an error."""
        base = group.request.first_handle
        finishes = [
            SequenceFinish(
                base + sample, reason, message=message, is_request_fault=is_request_fault
            )
            for sample in group.live_samples
        ]
        group.unborn = ()
        self.end_group(group, finishes)

    def _report(self, finish: SequenceFinish) -> None:
        del self.groups[finish.handle]
        self._outputs.finish(finish)

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

    def preempt(self, group: SequenceGroup, *, may_swap: bool = True) -> None:
        """Take all of a group's blocks; it keeps its key, and comes back as `Recovery` decides."""
        self._remove(group)
        if may_swap:
            self._recovery.save(group)
        for sequence in group.sequences:
            slot = sequence.slot
            sequence.num_pending = int(self._table.num_total[slot] - self._table.num_known[slot])
            self._vacate(sequence)
        if group.beams is not None:
            group.beams.candidates.clear()  # each row will give its own again
        group.state = GroupState.WAITING
        self.waiting.add(group)
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
        keys = [group.key for group in self.running]
        if keys != sorted(keys):
            raise EngineError("the running groups are out of order")
        waiting = {id(group) for group in self.groups.values() if group.state is GroupState.WAITING}
        if waiting != {id(group) for group in self.waiting} or len(waiting) != len(self.waiting):
            raise EngineError(f"{len(waiting)} groups wait but the policy holds others")
        if any(s.slot >= 0 for g in (*self.waiting, *self.parked) for s in g.sequences):
            raise EngineError("a waiting sequence holds a slot")
        num_used = self._kv.pool.num_used - self._pins.num_blocks + self._kv.host.num_used
        if not self.groups and (num_used or self.running or len(self.waiting) or self.parked):
            raise EngineError("blocks or groups are left although every request has ended")
