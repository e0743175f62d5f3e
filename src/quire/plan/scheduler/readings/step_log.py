"""Logs each step of a scheduler, and counts it for those who measure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.base.telemetry.flight.record import NUM_HANDLES, EventKind
from quire.plan.scheduler.drafts import ChosenDrafts
from quire.plan.scheduler.policies.policy import CountsTokens
from quire.plan.scheduler.state import SchedulerState
from quire.protocol.request import EngineRequest
from quire.protocol.status import WaitReason

__all__ = ["StepLog"]

Slots = npt.NDArray[np.int64]


class StepLog:
    """Each step is counted when its rows are chosen, and noted when its drafts are.

    steps_total: steps so far.
    """

    def __init__(self, state: SchedulerState, counter: CountsTokens | None) -> None:
        """counter: policy that counts tokens; None if it does not."""
        self.steps_total = 0
        self._state = state
        self._counter = counter

    def added(self, request: EngineRequest) -> None:
        """Log that a request has come, by its samples."""
        prompt, first = len(request.prompt_token_ids), request.first_handle + request.first_sample
        for handle in range(first, first + request.params.n):
            sample = handle - request.first_handle
            name = f"{request.request_id[:60]}[{sample}]" if sample else request.request_id
            self._state.flight.event(EventKind.ADDED, handle, prompt, name)

    def count(
        self,
        slots: Slots,
        tokens: Slots,
        of_prompts: npt.NDArray[np.bool_],
        prefill: int,
        now: float,
    ) -> None:
        """Report a step, [R], to what measures: the speed of prefill, the records of groups, and
        the policy's count of tokens. of_prompts: rows that compute parts of prompts. prefill:
        tokens of these."""
        self.steps_total += 1
        self._state.speed.step_planned(now, prefill)
        self._state.records.count(slots, tokens, of_prompts, prefill)
        if self._counter is not None:
            self._counter.count_tokens(self._state.table.account[slots], tokens)

    def note(
        self,
        slots: Slots,
        tokens: Slots,
        drafts: ChosenDrafts,
        of_prompts: npt.NDArray[np.bool_],
        prefill: int,
        now: float,
        *,
        num_in_flight: int,
        preempted_total: int,
        shortage: WaitReason,
    ) -> None:
        """Log the step that was counted last, before it is done in the table. num_in_flight: steps
        before it without a result. preempted_total: preemptions so far. shortage: reason why no
        more groups were admitted."""
        state, flight = self._state, self._state.flight
        pool, roster, num_waiting = state.kv.pool, state.roster, len(state.waiting)
        evicted, preempted = flight.since_last(pool.evicted_total, preempted_total)
        first = slots
        if prefill and len(slots) > NUM_HANDLES:
            first = np.concatenate((slots[of_prompts], slots[~of_prompts]))
        num_free, num_cached = pool.num_free, pool.num_cached
        flight.planned(
            (  # in the order of `PlannedPart`, whose names would cost a microsecond
                self.steps_total,
                int(now * 1e9),
                len(slots),
                int(np.count_nonzero(of_prompts)) if prefill else 0,
                int(np.add.reduce(tokens)) - prefill,
                prefill,
                int(drafts.counts.sum()) if len(drafts.slots) else 0,
                len(roster.running),
                num_waiting,
                len(roster.blocked),
                num_free,
                num_cached,
                pool.num_blocks - num_free - num_cached,
                evicted,
                len(state.tickets),
                num_in_flight,
                preempted,
                flight.reason_of(shortage.words) if num_waiting else b"",
                state.table.handle[first[:NUM_HANDLES]].tobytes(),
            )
        )
