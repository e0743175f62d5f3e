"""Launches steps: plan in, result out, at once or later."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from quire.base.errors import EngineLostError
from quire.compute.runner.changes import PlanChanges
from quire.compute.runner.device.queue import DeviceQueue
from quire.compute.runner.device.state import DeviceState
from quire.compute.runner.drafting.tokens import StepDrafter
from quire.compute.runner.draws import Draws
from quire.compute.runner.forward import Forward, ForwardPass
from quire.compute.runner.graphs.decode import Decoded, DecodeSteps
from quire.compute.runner.halves import in_order_of_writing
from quire.compute.runner.late import LateInputs, MadeDrafts, RowMasks
from quire.compute.runner.pending import DrawnStep, PendingStep
from quire.compute.runner.pooling import VectorPools
from quire.compute.runner.rows import RowTable, ScheduledRows, Slots
from quire.compute.runner.running_step import HostPart, RunningStep, Tenancy
from quire.compute.sampling import NO_TOKEN
from quire.ops.distributed import ALONE, Collectives
from quire.protocol.step import DRAFT_OF_MODEL, IntArray, RowFailure, StepPlan

__all__ = ["Runner"]


class Runner:
    """Owns the rows. Nothing of a row is committed before it was computed, so rows can be computed
    again when a step fails.

    Where kernels work in the host's memory, a step is over when its launch returns. Else the host's
    rows mirror those of a device (`DeviceState`), and a launch waits for no result, with one
    exception: rows whose tokens the host has to choose (edits by Python code, candidates of beams,
    drafts) need to know all tokens so far. A step whose rows wait for masks awaits `late_inputs`
    when its forward is under way. A row that fails on the device is still in the step
    after the one in which it failed; what that computes of it is dropped by its result.
    """

    def __init__(
        self,
        rows: RowTable,
        changes: PlanChanges,
        decode: DecodeSteps,
        forward: ForwardPass,
        draws: Draws,
        queue: DeviceQueue,
        state: DeviceState | None = None,
        drafter: StepDrafter | None = None,
        collectives: Collectives = ALONE,
    ) -> None:
        """decode: computes steps in which every row computes one token and draws. forward: computes
        all other steps. state: rows on the device; None where kernels read the host's rows.
        drafter: makes the drafts that plans leave to a model. collectives: connection to the ranks
        that compute the same rows."""
        self.late_inputs = LateInputs()
        self.made_drafts = MadeDrafts()
        self._rows = rows
        self._changes = changes
        self._decode = decode
        self._forward = forward
        self._draws = draws
        self._queue = queue
        self._state = state
        self._drafter = drafter
        self._collectives = collectives
        self._tenancy = Tenancy(len(rows.num_tokens))
        self._in_flight: deque[RunningStep] = deque()
        self._pools = VectorPools()
        self._drawn_slots: Slots | None = None  # of the last step, if a graph drew for all rows

    def launch(self, plan: StepPlan) -> PendingStep:
        """Apply the plan's difference and start its step, after all steps before it. Raises what
        ends the step as a whole."""
        slots, self._drawn_slots = self._drawn_slots, None
        if slots is None or not plan.keeps_rows:
            try:
                return self._launch(plan)
            finally:
                if len(plan.draft_slot):
                    self.made_drafts.end(plan.step_id)
        try:
            token_ids = self._repeat(plan)
        except EngineLostError:
            raise
        except BaseException:  # noqa: BLE001  whose fault it is, the other way finds out
            return self._launch(plan, replays=False)
        self._changes.commit_states(plan, slots)
        self._decode.keep_states(slots)
        return self._drawn(plan.step_id, slots, token_ids, [])

    def _repeat(self, plan: StepPlan) -> IntArray:
        """Run the last step once more and return its token ids. Its rows go on as before, so they
        are not examined."""
        self._rows.update_tables(plan)
        if self._drafter is not None and len(plan.table_slot):
            self._drafter.propose(plan)
        return self._decode.repeat()

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, *, replays: bool = True) -> PendingStep:
        self._settle(wait=False)
        self.late_inputs.forget_before(plan.step_id)
        if any(step.has_drawn(_sources(plan)) for step in self._in_flight):
            self._settle(wait=True)  # the mirror copies or replaces tokens of these rows
        with self._queue.computing():
            host = HostPart(failed=self._apply(plan))
            rows = self._scheduled(plan)
            before = self._in_flight[-1] if self._in_flight else None
            step = RunningStep(
                plan.step_id, before, self._tenancy, self._draws.failures, host, self._pools
            )
            decoded = None
            if replays and len(rows.slots) and not self._rows.reads_media(rows):
                positions = self._rows.num_tokens[rows.slots]
                decoded = self._decode.compute(rows, positions, draws=not plan.forks)
            masks = None
            if decoded is not None and decoded.logits is not None and not plan.forks:
                masks, token_ids = self._draw_masked(plan.step_id, rows.slots, decoded.logits)
                if token_ids is not None:
                    self._changes.commit_states(plan, rows.slots)
                    self._note(token_ids)
                    self._decode.keep_states(rows.slots)
                    made = self._num_drafts(plan, rows.slots)
                    return DrawnStep(
                        plan.step_id, rows.slots, token_ids.tolist(), host.failed, made
                    )
            if decoded is None or decoded.token_ids is None:
                self._compute(plan, rows, decoded, step, host, masks)
            elif self._state is None:
                self._changes.commit_states(plan, rows.slots)
                self._decode.keep_states(rows.slots)
                token_ids, made = decoded.token_ids.numpy(), self._num_drafts(plan, rows.slots)
                return self._drawn(plan.step_id, rows.slots, token_ids, host.failed, made)
            else:
                drawn = self._count_drawn([rows.slots])
                self._rows.commit_computed(rows)
                step.expect(drawn, [], self._queue.copy_out([decoded.token_ids]))
        self._in_flight.append(step)
        if self._state is None:
            self._settle(wait=True)
            self._note(step.result().token_ids)
        return step

    def _note(self, token_ids: IntArray) -> None:
        """Ranks that drew different tokens notice it in the next step."""
        if self._collectives.size > 1:
            self._collectives.note(token_ids.tobytes())

    def _draw_masked(
        self, step_id: int, slots: Slots, logits: torch.Tensor
    ) -> tuple[RowMasks | None, IntArray | None]:
        """Return the masks of a decode step, None if none of them can be applied at once; and the
        token ids of its rows, if every row has drawn one."""
        if self._state is not None or not self._decode.may_draw_masked:
            return None, None
        masks = self.late_inputs.take(step_id)
        if masks.failures(self._draws.waiting_for_masks(slots).tolist()):
            return masks, None
        return masks, self._decode.draw_masked(logits, (masks.words, masks.index(slots, 0)))

    def _settle(self, *, wait: bool) -> None:
        """Take in the results of finished steps. wait: whether to wait for all steps. A step that
        failed as a whole has no results: the next plan removes all its rows."""
        while self._in_flight and (wait or self._in_flight[0].is_over):
            step = self._in_flight.popleft()
            try:
                step.result()
            except BaseException:  # noqa: BLE001  whoever waits for that step is told
                continue
            step.settle(self._rows)

    def _apply(self, plan: StepPlan) -> list[RowFailure]:
        if self._drafter is not None:
            self._drafter.settle()
        failed = self._changes.apply(plan)
        if self._drafter is not None:
            self._drafter.propose(plan)
            self._publish_drafts(plan)
        self._changes.keep_tokens()
        for slot in (*(row.slot for row in plan.enter), *plan.start_fork_dst.tolist()):
            self._tenancy.begin(slot)
        if self._state is not None:
            self._state.take(plan)
        return failed

    def _publish_drafts(self, plan: StepPlan) -> None:
        """Publish the drafts of rows that wait for masks."""
        of_model = plan.draft_slot[plan.draft_token == DRAFT_OF_MODEL].astype(np.int64)
        if not len(of_model):
            return
        waiting = self._draws.waiting_for_masks(np.unique(of_model))
        rows, found = self._rows, dict[int, IntArray]()
        for slot in waiting.tolist():
            end = int(rows.num_tokens[slot])
            found[slot] = rows.token_ids[slot, end : end + int(rows.num_drafts[slot])].copy()
        self.made_drafts.put(plan.step_id, found)

    def _scheduled(self, plan: StepPlan) -> ScheduledRows:
        rows = in_order_of_writing(self._rows.scheduled(), plan)
        if not self._in_flight or self._draws.by_kernels(rows.slots[rows.samples]).all():
            return rows
        self._settle(wait=True)
        return in_order_of_writing(self._rows.scheduled(), plan)

    def _num_drafts(self, plan: StepPlan, slots: Slots) -> IntArray | None:
        """`StepResult.num_drafts` of these rows, None in a step that was to have no drafts."""
        return self._rows.num_drafts[slots].astype(np.int32) if len(plan.draft_slot) else None

    def _drawn(
        self,
        step_id: int,
        slots: Slots,
        token_ids: IntArray,
        failed: list[RowFailure],
        num_drafts: IntArray | None = None,
    ) -> PendingStep:
        """Return a step that has drawn and committed all its tokens [R], NO_TOKEN in rows without
        one. num_drafts: see `StepResult`."""
        self._note(token_ids)
        logprobs = self._decode.read_logprobs(token_ids)
        drawn = token_ids.tolist()
        if NO_TOKEN in drawn:
            failed += self._draws.failures(token_ids, slots, self._rows.num_tokens[slots] - 1)
            is_drawn = token_ids != NO_TOKEN
            self._rows.failed[slots[~is_drawn]] = True
            slots, drawn = slots[is_drawn], token_ids[is_drawn].tolist()
            num_drafts = None if num_drafts is None else num_drafts[is_drawn]
        else:
            self._drawn_slots = slots
        return DrawnStep(step_id, slots, drawn, failed, num_drafts, logprobs)

    def _compute(
        self,
        plan: StepPlan,
        rows: ScheduledRows,
        decoded: Decoded | None,
        step: RunningStep,
        host: HostPart,
        masks: RowMasks | None = None,
    ) -> None:
        """decoded: the logits of all rows, if a graph has computed them. masks: the step's masks,
        if they were awaited already."""
        if decoded is not None and decoded.logits is not None:
            slots = rows.slots.tolist()
            forward = Forward(slots, list(range(len(slots))), [decoded.logits])
        else:
            if self._state is not None and not len(rows.slots):
                self._state.send(None)
            forward = self._forward.compute(rows)
        self._rows.failed[[failure.slot for failure in forward.failed]] = True
        self._rows.commit_computed(rows)
        if decoded is not None and decoded.logits is not None:
            self._decode.keep_states(rows.slots)
        sampled = dict(zip(forward.slots, forward.first_logits, strict=True))
        forward.failed += self._fork(plan, sampled)
        masks = self._await_masks(plan.step_id, forward, sampled, masks)
        host.num_drafts = self._rows.num_drafts.copy() if len(plan.draft_slot) else None
        drawn = self._sample(forward, sampled, masks, step, host)
        self._changes.settle_states(plan, rows)
        if self._state is not None:
            self._state.note_computed(np.setdiff1d(rows.slots, drawn))
        host.failed += forward.failed
        host.prompt_logprobs = forward.prompt_logprobs

    def _count_drawn(self, pieces: list[Slots]) -> list[tuple[Slots, Slots]]:
        """Count the token that the device has appended to each of these rows; the host learns later
        which token it was. Return slots and positions of the tokens."""
        drawn = [(slots, self._rows.num_tokens[slots]) for slots in pieces]
        for slots, positions in drawn:
            self._rows.num_tokens[slots] = positions + 1
        return drawn

    def _fork(self, plan: StepPlan, sampled: dict[int, int]) -> list[RowFailure]:
        if not plan.forks:
            return []
        failed = self._changes.fork(plan, sampled)
        for fork in plan.forks:
            self._tenancy.begin(fork.dst)
        if self._state is not None:
            self._state.fork([(fork.src, fork.dst) for fork in plan.forks])
            self._state.send(None)
        return failed

    def _await_masks(
        self, step_id: int, forward: Forward, sampled: dict[int, int], masks: RowMasks | None
    ) -> RowMasks | None:
        """Return the masks of the rows that sample; None if no row waits for one. A row that waits
        for a mask and has none fails, and samples no more. sampled: see `_sample`."""
        waiting = self._draws.waiting_for_masks(np.fromiter(sampled, np.int64, len(sampled)))
        if not len(waiting):
            return None
        masks = masks or self.late_inputs.take(step_id)
        failed = masks.failures(waiting.tolist())
        for failure in failed:
            del sampled[failure.slot]
        self._rows.failed[[failure.slot for failure in failed]] = True
        forward.failed += failed
        return masks

    def _sample(
        self,
        forward: Forward,
        sampled: dict[int, int],
        masks: RowMasks | None,
        step: RunningStep,
        host: HostPart,
    ) -> Slots:
        """Return the slots that kernels draw for. sampled: slots, each with the index of its first
        logits."""
        slots = np.fromiter(sampled, np.int64, len(sampled))
        index = np.fromiter(sampled.values(), np.int64, len(sampled))
        if len(slots):
            logits = forward.logits[0] if len(forward.logits) == 1 else torch.cat(forward.logits)
            host.sampled = self._draws.sample(logits, slots, index, masks)
        given = host.sampled
        self._rows.failed[[failure.slot for failure in given.failed]] = True
        if self._state is not None:
            self._state.note_drawn(given.drawn)
            self._state.note_drawn(given.kept)
        drawn = self._count_drawn([piece.slots for piece in given.pieces])
        logprobs = [piece.logprobs for piece in given.pieces]
        tensors = [piece.token_ids for piece in given.pieces]
        tensors += [tensor for _, tensor in (*forward.unfinished, *forward.pooled)]
        for each in logprobs:
            tensors += () if each is None else each.tensors
        step.expect(
            drawn,
            [slots for slots, _ in forward.unfinished],
            self._queue.copy_out(tensors) if tensors else None,
            logprobs,
            [piece for piece, _ in forward.pooled],
        )
        return np.concatenate([np.zeros(0, np.int64), *(piece.slots for piece in given.pieces)])


def _sources(plan: StepPlan) -> Slots:
    """Rows that others branch off from, and rows that are rewound."""
    forks = np.array([fork.src for fork in plan.forks], np.int64)
    return np.concatenate((forks, plan.start_fork_src, plan.rewind_slot)).astype(np.int64)
