"""Executes one step where the rows are the host's: plan in, result out."""

from __future__ import annotations

import numpy as np
import torch

from quire.protocol.step import NOTHING_DRAWN, IntArray, RowFailure, StepPlan, StepResult
from quire.runner.captured import CapturedSteps, Replayed
from quire.runner.changes import PlanChanges
from quire.runner.drafts import counts_of
from quire.runner.forward import NOT_FINITE, Forward, ForwardPass, in_order_of_writing
from quire.runner.host_draws import HostDraws, HostSample
from quire.runner.pending import DrawnStep, FinishedStep, PendingStep
from quire.runner.rows import RowTable, ScheduledRows, Slots
from quire.sampling import NO_TOKEN, failures_of

__all__ = ["ModelRunner"]


class ModelRunner:
    """Owns the rows. Nothing of a row is committed before it was computed, so rows can be computed
    again when a step fails."""

    def __init__(
        self,
        rows: RowTable,
        changes: PlanChanges,
        captured: CapturedSteps,
        forward: ForwardPass,
        draws: HostDraws,
    ) -> None:
        """captured: decode steps that need no Python; forward: all others."""
        self._rows = rows
        self._changes = changes
        self._captured = captured
        self._forward = forward
        self._draws = draws
        self._drawn_slots: Slots | None = None  # of the last step, if a captured one drew for all

    def launch(self, plan: StepPlan) -> PendingStep:
        """As `DeviceRunner.launch`, but the step is over when this returns: apply the plan's
        difference, compute its rows, sample, and commit."""
        slots, self._drawn_slots = self._drawn_slots, None
        if slots is None or not plan.keeps_rows:
            return self._compute(plan)
        try:
            token_ids = self._repeat(plan)
        except Exception:  # noqa: BLE001  whose fault it is, the other way finds out
            return self._compute(plan, replays=False)
        return self._drawn(plan.step_id, slots, token_ids, [])

    def _repeat(self, plan: StepPlan) -> IntArray:
        """Token ids of the rows of the last step, which go on as they did, without a look at
        them."""
        self._rows.update_tables(plan)
        return self._captured.repeat()

    @torch.inference_mode()
    def _compute(self, plan: StepPlan, *, replays: bool = True) -> PendingStep:
        refused = self._changes.apply(plan)
        rows = in_order_of_writing(self._rows.scheduled(), plan)
        replayed = self._replay(rows, draws=not plan.forks) if replays else None
        if replayed is not None and replayed.token_ids is not None:
            return self._drawn(plan.step_id, rows.slots, replayed.token_ids, refused)
        forward = self._forward.compute(rows) if replayed is None else _whole(rows, replayed)
        forward.failed += refused + _broken(forward)
        self._rows.failed[[failure.slot for failure in forward.failed]] = True
        self._rows.commit_computed(rows)
        sampled = dict(zip(forward.slots, forward.first_logits, strict=True))
        forward.failed += self._changes.fork(plan, sampled)
        sample = self._sample(forward, sampled)
        result = StepResult(
            step_id=plan.step_id,
            slots=sample.drawn.slots.astype(np.int32),
            token_ids=sample.drawn.token_ids,
            counts=counts_of(sample.drawn),
            candidates=sample.candidates,
            logprobs=sample.logprobs,
            prompt_logprobs=forward.prompt_logprobs,
            failed=(*forward.failed, *sample.failed),
        )
        return FinishedStep(result)

    def _replay(self, rows: ScheduledRows, *, draws: bool) -> Replayed | None:
        """Decode steps by a captured one; None for all others."""
        if not len(rows.slots):
            return None
        try:
            return self._captured.compute(rows, self._rows.num_tokens[rows.slots], draws=draws)
        except Exception:  # noqa: BLE001  whose fault it is, the other way finds out
            return None

    def _drawn(
        self, step_id: int, slots: Slots, token_ids: IntArray, failed: list[RowFailure]
    ) -> PendingStep:
        """A step that has drawn and committed all its tokens [R], NO_TOKEN in rows without one."""
        drawn = token_ids.tolist()
        if NO_TOKEN in drawn:
            failed += failures_of(token_ids, slots, self._rows.num_tokens[slots] - 1)
            is_drawn = token_ids != NO_TOKEN
            self._rows.failed[slots[~is_drawn]] = True
            slots, drawn = slots[is_drawn], token_ids[is_drawn].tolist()
        else:
            self._drawn_slots = slots
        return DrawnStep(step_id, slots, drawn, failed)

    def _sample(self, forward: Forward, sampled: dict[int, int]) -> HostSample:
        """sampled: slots, each with the index of its logits."""
        slots = np.fromiter(sampled, np.int64, len(sampled))
        if not len(slots):
            return HostSample(NOTHING_DRAWN)
        logits = forward.logits[0] if len(forward.logits) == 1 else torch.cat(forward.logits)
        index = np.fromiter(sampled.values(), np.int64, len(sampled))
        return self._draws.sample(logits, slots, index)


def _whole(rows: ScheduledRows, replayed: Replayed) -> Forward:
    slots = rows.slots.tolist()
    return Forward(slots, list(range(len(slots))), [replayed.logits])


def _broken(forward: Forward) -> list[RowFailure]:
    """Rows in the middle of a prompt whose hidden state is broken. What they wrote must not be
    taken for good until they sample, which is where the sampler finds the same of the others."""
    return [
        RowFailure(slot, NOT_FINITE)
        for slots, is_finite in forward.unfinished
        for slot in slots[~is_finite.numpy()].tolist()
    ]
