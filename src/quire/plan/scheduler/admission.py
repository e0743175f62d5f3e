"""Lets waiting groups in, in the policy's order, as far as tokens and blocks go."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.base.telemetry.flight.record import EventKind
from quire.plan.scheduler.allocation import Allocation
from quire.plan.scheduler.lifecycle import Lifecycle
from quire.plan.scheduler.loads import Loads
from quire.plan.scheduler.sequence import SequenceGroup
from quire.plan.scheduler.state import SchedulerState
from quire.plan.scheduler.token_budget import StepTokens, TokenBudget
from quire.protocol.request import FinishReason
from quire.protocol.status import WaitReason

__all__ = ["Admission"]

Slots = npt.NDArray[np.int64]


class Admission:
    """Admits waiting groups, and drops those that can no longer be served in time."""

    def __init__(
        self,
        state: SchedulerState,
        lifecycle: Lifecycle,
        budget: TokenBudget,
        allocation: Allocation,
        loads: Loads,
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._budget = budget
        self._allocation = allocation
        self._loads = loads
        self._was_short = False
        self.shortage = WaitReason.STEP
        """Reason why the last call of `admit` admitted no more groups; `STEP` if no more waited."""

    def take_from_spare(self) -> None:
        """Preempt a group on spare capacity if there is no slot for a waiting group, or the last
        step had no room for it. Call this before a step is shared out. Nothing is preempted while
        admission is held."""
        waiting = self._state.waiting
        is_short = self._was_short or self._state.num_free_slots <= 0
        if is_short and waiting.num_urgent and not waiting.is_held:
            self._lifecycle.yield_spare()
        self._was_short = False

    def admit(self, slots: Slots, tokens: Slots, now: float) -> tuple[Slots, Slots]:
        """Admit waiting groups in order until one does not fit; it holds back all groups behind it.
        They compute with the tokens that are left, or that were given to running prompts behind
        them in the order. slots, tokens: slots of running sequences and the tokens that each
        computes, [R]. Return the same for all sequences after the admission."""
        if self._state.num_free_slots <= 0 and not self._lifecycle.yield_idle():
            self._was_short = True
            self.shortage = WaitReason.PLACES
            return slots, tokens
        step = self._budget.open(slots, tokens)
        num_uncached = self._state.prefixes.num_uncached
        while group := self._state.waiting.first(step.may_start, num_uncached):
            if group.is_spare and self._budget.is_spare_paused:
                self.shortage = WaitReason.SPARE
                break
            if self._state.deadlines.is_late(group, now, self._prefill_speed(now)):
                self._drop(group)
                continue
            if any(sequence.num_pending for sequence in group.sequences):
                self.shortage = WaitReason.PENDING
                break
            if self._allocation.has_nothing_to_compute(group):
                self._lifecycle.await_input(group)
                continue
            if self._awaits_state(group, step):
                self.shortage = WaitReason.STATE
                break
            if self._loads.start(group, now):
                self._state.roster.block(group)
                continue
            budget = self._allocation.usable(group, step.offered_to(group))
            chunks = self._allocation.place(group, budget)
            is_short = budget > 0 and not chunks
            if is_short and self._lifecycle.free_idle(
                is_last_resort=not self._state.roster.progressing
            ):
                continue
            if not chunks:
                self._was_short = is_short
                self.shortage = self._why_short(group) if is_short else WaitReason.TOKENS
                break
            if group.blocked_on:
                self._state.roster.block(group)
                continue
            self._state.roster.run(group)
            cached = int(self._state.table.num_computed[group.sequences[0].slot])
            self._state.flight.event(EventKind.ADMITTED, group.request.first_handle, cached)
            step.admit(chunks, is_spare=group.is_spare)
        else:
            waiting = self._state.waiting
            behind = WaitReason.TOKENS if waiting else WaitReason.STEP
            self.shortage = WaitReason.HELD if waiting.is_held else behind
        return step.chosen()

    def skip(self) -> None:
        """Note that a step admits nobody, since groups were preempted for those that run."""
        self.shortage = WaitReason.BLOCKS

    def _why_short(self, group: SequenceGroup) -> WaitReason:
        free = self._state.num_free_slots
        return WaitReason.BLOCKS if group.num_slots <= free else WaitReason.PLACES

    def _awaits_state(self, group: SequenceGroup, step: StepTokens) -> bool:
        """Return whether a group had better wait: a sequence that computes in this step is about to
        keep a recurrent state from which it can start. Blocks are shared within a step, states are
        not."""
        prefixes, states = self._state.prefixes, self._state.states
        first = group.sequences[0]
        if states is None or first.swapped is not None or not prefixes.may_serve(first):
            return False
        return states.is_coming(first, prefixes.lookup(first).num_tokens, step.chosen()[0])

    def drop_late(self, now: float) -> None:
        """End the waiting groups whose first token can no longer come before their deadline."""
        for group in self._state.deadlines.pop_late(now, self._prefill_speed(now)):
            self._drop(group)

    def _prefill_speed(self, now: float) -> float:
        """Return the speed of prefill by which requests are dropped. It is 0.0 while nothing runs,
        so that a wrong estimate cannot drop the very requests that would correct it."""
        return self._state.speed.tokens_per_s(now) if self._state.roster.running else 0.0

    def _drop(self, group: SequenceGroup) -> None:
        message = (
            f"the first token cannot come within {group.request.scheduling.deadline_s:g} s of "
            "the request's arrival (deadline_s), so its prompt was not computed: send it "
            "again when the engine has less to do, or allow more time"
        )
        self._lifecycle.fail(group, message, FinishReason.DEADLINE)
