"""Lifecycle of groups: preempted, branched, ended, with the blocks that they take and give back."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from quire.base.errors import EngineError
from quire.base.telemetry.flight.record import EventKind
from quire.plan.scheduler.sequence import Sequence, SequenceGroup
from quire.plan.scheduler.state import SchedulerState
from quire.protocol.request import FinishReason, SequenceFinish
from quire.protocol.status import LoadOutcome, PreemptionCause

__all__ = ["Lifecycle"]


class Lifecycle:
    """Moves groups between the states of the roster, with their slots, blocks and outputs.

    preempted_total: groups that lost their blocks before they ended.
    """

    def __init__(
        self, state: SchedulerState, on_end: Callable[[Sequence], None] = lambda _: None
    ) -> None:
        """on_end: told of each sequence that ends while it still has its tokens."""
        self._state = state
        self._on_end = on_end
        self.preempted_total = 0

    def queue(self, group: SequenceGroup) -> None:
        """Add a new group. The last known token of an open prompt is not computed yet, so a single
        token gives no work.
        Raises EngineError if one of its handles is in use."""
        if group.request.is_open and len(group.sequences[0].token_ids) < 2:
            self._start_input(group)
        self._state.roster.add(group)

    # --- waiting for tickets --------------------------------------------------------------------

    def await_input(self, group: SequenceGroup) -> None:
        """Block a group that has nothing to compute before its prompt goes on."""
        self._start_input(group)
        self._state.roster.block(group)

    def _start_input(self, group: SequenceGroup) -> None:
        group.input_ticket = self._state.tickets.start(group, "the rest of its prompt")

    def block_idle(self) -> None:
        """Block the running groups that have nothing to compute before their prompts go on."""
        todo = self._state.table.todo()
        for group in list(self._state.roster.arriving):
            if group.request.is_open and not todo[group.sequences[0].slot]:
                self.await_input(group)

    def input_arrived(self, group: SequenceGroup) -> None:
        """Unblock a group that waited for more of its prompt, if that gave it work."""
        ticket = group.input_ticket
        if ticket is None or ticket not in group.blocked_on:
            return
        sequence, table = group.sequences[0], self._state.table
        if sequence.slot >= 0:
            has_work = bool(table.todo()[sequence.slot])
        else:
            has_work = not group.request.is_open or len(sequence.token_ids) > 1
        if has_work:
            self.end_ticket(ticket)

    def end_ticket(self, ticket: int, lost: frozenset[int] = frozenset()) -> None:
        """End a piece of work; its group goes on if it waits for nothing else. lost: blocks that it
        should have filled and has not; they are computed again."""
        self._state.kv.end_ticket(ticket, lost)
        for group in self._state.tickets.end(ticket):
            if lost:
                group.record.load = LoadOutcome.LOST
            if group.is_coming_in and not self._take_in(group, lost):
                continue
            self._unblock(group)

    def stop_waiting(self, group: SequenceGroup, tickets: Iterable[int]) -> None:
        """Let a group go on without what these loads bring."""
        for ticket in tickets:
            self._state.tickets.leave(ticket, group)
        self._unblock(group)

    def _unblock(self, group: SequenceGroup) -> None:
        if not group.blocked_on:
            self._go_on(group)

    def _take_in(self, group: SequenceGroup, lost: frozenset[int]) -> bool:
        """Note that a swapped group is back on the device; return whether it can go on with the
        blocks that arrived. If not, it waits to be computed again."""
        state = self._state
        checkpoints = state.recovery.arrive(group, lost)
        if checkpoints is None:
            self.preempt(group, PreemptionCause.RESULT, may_swap=False)
            return False
        num_kept = 0
        for sequence, checkpoint in zip(group.sequences, checkpoints, strict=True):
            num_computed = int(state.table.num_computed[sequence.slot])
            num_kept += num_computed
            state.prefixes.publish_to(sequence.slot, num_computed)
            state.builder.enter(sequence, num_computed, checkpoint)
        group.record.come_back(num_kept, state.roster.clock.now)
        return True

    def _go_on(self, group: SequenceGroup) -> None:
        if group.has_slots:
            self._state.roster.run(group)
            self.block_idle()  # it may have come in with nothing to compute
        else:
            self._state.roster.wait(group)

    def await_verdict(self, group: SequenceGroup) -> None:
        """Block a group without slots one of whose sequences has nothing left to compute."""
        group.verdict_ticket = self._state.tickets.start(group, "an output hook")
        self._state.roster.block(group)

    def settle_verdicts(self, group: SequenceGroup) -> None:
        """Unblock a group that waited for verdicts, if the last one has come."""
        ticket = group.verdict_ticket
        if ticket is not None and not group.awaits_verdict:
            group.verdict_ticket = None
            self.end_ticket(ticket)

    # --- making room ----------------------------------------------------------------------------

    def yield_idle(self) -> bool:
        """Preempt the last group by key that has nothing to compute before its prompt goes on.
        Return whether there was one."""
        idle = [g for g in self._state.roster.blocked if g.has_slots and not g.is_coming_in]
        if not idle:
            return False
        group = max(idle, key=lambda g: g.key)
        self.preempt(group, PreemptionCause.IDLE)
        self.await_input(group)
        return True

    def free_idle(self, *, is_last_resort: bool) -> bool:
        """Preempt a group that has nothing to compute; if `is_last_resort`, release a pin instead
        where there is none and no blocks become free when copies end. Return whether blocks were
        freed."""
        may_unpin = is_last_resort and not self._state.kv.num_orphaned
        return self.yield_idle() or (may_unpin and self._state.pins.release_one())

    def yield_spare(self) -> None:
        """Preempt the newest running group on spare capacity, if there is one."""
        running = self._state.roster.running
        if running and running[-1].is_spare:
            self.preempt(running[-1], PreemptionCause.SPARE)

    def make_room(self, taker: SequenceGroup) -> bool:
        """Free blocks for `taker`, which runs, to grow. Groups that do not compute give theirs,
        or else the last group by key is preempted. Return False if more blocks become free only
        when copies end."""
        progressing, kv = self._state.roster.progressing, self._state.kv
        if self.free_idle(is_last_resort=len(progressing) == 1):
            return True
        if kv.num_orphaned:
            return False
        last = max(progressing, key=lambda g: g.key)
        self.preempt(last, PreemptionCause.BLOCKS, taker)
        return not kv.num_orphaned

    def preempt(
        self,
        group: SequenceGroup,
        cause: PreemptionCause = PreemptionCause.BLOCKS,
        taker: SequenceGroup | None = None,
        *,
        may_swap: bool = True,
    ) -> None:
        """Take all blocks of a group. It keeps its key, and `Recovery` decides how it comes back. A
        group that is being swapped in stays on the host; its device blocks are free when the copies
        end. taker: the group that needs the blocks, if one does."""
        state = self._state
        if may_swap and not group.is_coming_in:
            state.recovery.save(group)
        self._note_preemption(group, cause, taker)
        is_swapped = any(sequence.swapped is not None for sequence in group.sequences)
        state.flight.event(
            EventKind.PREEMPTED,
            group.request.first_handle,
            sum(int(state.table.num_computed[sequence.slot]) for sequence in group.sequences),
            "swapped to the host" if is_swapped else "to be computed again",
        )
        for sequence in group.sequences:
            slot = sequence.slot
            sequence.num_pending = int(state.table.num_total[slot] - state.table.num_known[slot])
            self._vacate(sequence)
        if group.beams is not None:
            group.beams.candidates.clear()  # each row will give its own again
        state.tickets.forget(group)
        state.roster.wait(group)
        if group.awaits_verdict:
            self.await_verdict(group)
        self.preempted_total += 1

    def _note_preemption(
        self, group: SequenceGroup, cause: PreemptionCause, taker: SequenceGroup | None
    ) -> None:
        """Note it before the group leaves its slots."""
        slots = [sequence.slot for sequence in group.sequences]
        swapped = [each.swapped.num_tokens for each in group.sequences if each.swapped is not None]
        group.record.preempt(
            cause,
            None if taker is None or taker is group else taker.record.other,
            num_computed=int(self._state.table.num_computed[slots].sum()),
            num_swapped=sum(swapped),
            now=self._state.roster.clock.now,
        )

    def _vacate(self, sequence: Sequence) -> None:
        self._state.kv.free(sequence.slot)
        self._state.builder.leave(self._state.table.leave(sequence))

    def holders(self) -> list[SequenceGroup]:
        """The groups that have slots."""
        roster = self._state.roster
        return [*roster.running, *(group for group in roster.blocked if group.has_slots)]

    def vacate(self) -> None:
        """Take the blocks of all groups, on device and host, for good."""
        self._lose_copies()
        for group in self.holders():
            self.preempt(group, PreemptionCause.MEMORY, may_swap=False)
        roster = self._state.roster
        for group in (*roster.waiting, *roster.blocked):
            self._state.recovery.forget(group)

    def _lose_copies(self) -> None:
        """Take in that copies under way are lost: groups that only wait for loads wait no more."""
        lost = set(self._state.kv.lose_copies())
        for group in list(self._state.roster.blocked):
            tickets = lost & group.blocked_on
            if tickets and not group.is_coming_in:
                self.stop_waiting(group, tickets)

    def lose_steps(self, message: str) -> None:
        """Take in that the steps in flight are lost, and perhaps copies too. Groups with rows fail,
        groups that were being swapped in wait again, and no block on the host is trusted."""
        roster = self._state.roster
        self._lose_copies()
        for group in self.holders():
            if group.is_coming_in:
                self.preempt(group, PreemptionCause.MEMORY, may_swap=False)
            else:
                self.fail(group, message)
        for group in (*roster.waiting, *roster.blocked):
            self._state.recovery.forget(group)

    # --- branching ------------------------------------------------------------------------------

    def branch_off(self, source: Sequence, sample_index: int) -> Sequence:
        """Copy a running sequence to a slot of its own, over the same blocks. The caller adds it
        to the group."""
        table = self._state.table
        tokens = table.known_tokens(source.slot)
        sequence = Sequence(source.group, sample_index, tokens, list(source.names))
        slot = table.enter(sequence, int(table.num_computed[source.slot]))
        table.copy_steps(source.slot, slot)
        self._state.kv.fork(source.slot, slot)
        return sequence

    def branch_ready(self) -> None:
        """Fork the samples whose prompts are computed by the step that is being planned."""
        roster = self._state.roster
        for group in roster.branching:
            self._branch_unborn(group)
        roster.settle_branching()

    def _branch_unborn(self, group: SequenceGroup) -> None:
        table = self._state.table
        source = group.sequences[0]
        if table.num_total[source.slot] == table.num_known[source.slot]:
            return  # its prompt is not computed yet
        for sample in group.unborn:
            sequence = self.branch_off(source, sample)
            table.num_total[sequence.slot] += 1
            group.sequences.append(sequence)
            self._state.builder.fork(source.slot, sequence.slot, sample)
        group.unborn = ()

    # --- ending ---------------------------------------------------------------------------------

    def abort(self, handle: int, message: str = "") -> None:
        """End one sequence, whatever its state; its finish leaves with the next output. message:
        why, unless its client asked."""
        group = self._state.roster.groups.get(handle)
        if group is None:
            return
        sample = handle - group.request.first_handle
        finish = SequenceFinish(handle, FinishReason.ABORT, message=message)
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
        """Let the first waiting sample take the place of the only sequence, which was aborted. A
        row's random stream is fixed when it enters, so a running sequence starts again; the prefix
        cache returns its blocks."""
        if sequence.slot >= 0:
            self.preempt(group, PreemptionCause.RESULT)
        sequence.sample_index, *rest = group.unborn
        group.unborn = tuple(rest)

    def finish(self, sequence: Sequence, finish: SequenceFinish) -> None:
        """End one sequence and take back what it holds, but for a prefix that it pins."""
        self._on_end(sequence)
        finish = self._state.pins.keep(sequence, finish)
        self.drop(sequence)
        self._close(sequence.group, finish)

    def drop(self, sequence: Sequence) -> None:
        """Take back what one sequence holds; its group goes on."""
        if sequence.slot >= 0:
            self._vacate(sequence)
        if sequence.swapped is not None:
            self._state.kv.swaps.discard(sequence.swapped)
            sequence.swapped = None
        sequence.num_pending = 0
        self._state.unsent.forget(sequence)
        sequence.group.sequences.remove(sequence)

    def end_group(self, group: SequenceGroup, finishes: Iterable[SequenceFinish]) -> None:
        """End all sequences of a group at once; `finishes` are the last words on its samples."""
        for sequence in list(group.sequences):
            self.drop(sequence)
        for finish in finishes:
            self._report(finish)
        self._end(group)

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

    def _close(self, group: SequenceGroup, finish: SequenceFinish) -> None:
        """Report the end of one sequence, and drop its group when it was the last."""
        self._report(finish)
        if not group.sequences:
            self._end(group)
        else:
            self.settle_verdicts(group)

    def _end(self, group: SequenceGroup) -> None:
        self._state.tickets.forget(group)
        self._state.roster.end(group)
        self._state.records.ended(group)

    def _report(self, finish: SequenceFinish) -> None:
        reason = finish.reason.value + (f": {finish.message}" if finish.message else "")
        self._state.flight.event(EventKind.ENDED, finish.handle, text=reason)
        self._state.roster.end_sequence(finish.handle)
        self._state.outputs.finish(finish)

    # --- truths ---------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise EngineError if slots, blocks and queues disagree."""
        state, roster = self._state, self._state.roster
        roster.check_invariants()
        with_rows = [g for g in (*roster.running, *roster.blocked) if not g.is_coming_in]
        held = {s.slot for group in with_rows for s in group.sequences if s.slot >= 0}
        if held != set(np.flatnonzero(state.table.live).tolist()):
            raise EngineError(f"slots {sorted(held)} are held but other slots are live")
        num_used = state.kv.pool.num_used - state.pins.num_blocks + state.kv.host.num_used
        under_way = state.kv.transfers.are_under_way or state.kv.sources.beside.are_under_way
        if not roster.groups and num_used and not under_way:
            raise EngineError("blocks are left although every request has ended")
