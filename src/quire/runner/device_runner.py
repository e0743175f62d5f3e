"""Launches steps where the rows are the device's: it draws tokens that the host learns later."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from quire.protocol.step import RowFailure, StepPlan
from quire.runner.changes import PlanChanges
from quire.runner.device_draws import DeviceDraws, DrawnPiece
from quire.runner.device_queue import DeviceQueue
from quire.runner.device_state import DeviceState
from quire.runner.device_step import DeviceStep, HostPart, Tenancy
from quire.runner.forward import Forward, ForwardPass, in_order_of_writing
from quire.runner.host_draws import HostDraws
from quire.runner.rows import RowTable, ScheduledRows, Slots
from quire.runner.uniform_steps import UniformSteps

__all__ = ["DeviceRunner"]


class DeviceRunner:
    """The host's rows are a mirror of the device's (`DeviceState`). A launch waits for no result,
    with one exception: rows whose tokens the host has to choose (edits by Python code, candidates
    of beams) need to know all tokens so far.

    A row that fails on the device is still in the step after the one in which it failed; what that
    computes of it is dropped by its result.
    """

    def __init__(
        self,
        rows: RowTable,
        state: DeviceState,
        changes: PlanChanges,
        uniform: UniformSteps,
        forward: ForwardPass,
        draws: DeviceDraws,
        host_draws: HostDraws,
        queue: DeviceQueue,
    ) -> None:
        """uniform: for steps in which every row computes one token and draws; forward: others."""
        self._rows = rows
        self._state = state
        self._changes = changes
        self._uniform = uniform
        self._forward = forward
        self._draws = draws
        self._host_draws = host_draws
        self._queue = queue
        self._tenancy = Tenancy(len(rows.num_tokens))
        self._in_flight: deque[DeviceStep] = deque()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> DeviceStep:
        """Apply the plan's difference and start its step, after all steps before it."""
        self._settle(wait=False)
        if any(step.has_drawn(_sources(plan)) for step in self._in_flight):
            self._settle(wait=True)  # the mirror copies the tokens of rows that branch off
        with self._queue.computing():
            host = HostPart(failed=self._apply(plan))
            rows = in_order_of_writing(self._rows.scheduled(), plan)
            if not self._draws_on_device(rows.slots[rows.samples]).all():
                self._settle(wait=True)
                rows = in_order_of_writing(self._rows.scheduled(), plan)
            before = self._in_flight[-1] if self._in_flight else None
            step = DeviceStep(plan.step_id, before, self._tenancy, self._draws.failures, host)
            self._compute(plan, rows, step, host)
        self._in_flight.append(step)
        return step

    def _settle(self, *, wait: bool) -> None:
        """Learn from steps whose results are there; wait: from all. A step that ended as a whole
        tells nothing: the next plan takes all rows out."""
        while self._in_flight and (wait or self._in_flight[0].is_over):
            step = self._in_flight.popleft()
            try:
                step.result()
            except Exception:  # noqa: BLE001  whoever waits for that step is told
                continue
            step.settle(self._rows)

    def _apply(self, plan: StepPlan) -> list[RowFailure]:
        failed = self._changes.apply(plan)
        for slot in (*(row.slot for row in plan.enter), *plan.start_fork_dst.tolist()):
            self._tenancy.begin(slot)
        self._state.take(plan)
        return failed

    def _compute(
        self, plan: StepPlan, rows: ScheduledRows, step: DeviceStep, host: HostPart
    ) -> None:
        if not plan.forks and self._uniform.serves(rows):
            tokens = self._uniform.launch(rows)
            if tokens is not None:
                drawn = self._count_drawn([rows.slots])
                self._rows.commit_computed(rows)
                step.expect(drawn, [], self._queue.copy_out([tokens]))
                return
        if not len(rows.slots):
            self._state.send(None)
        forward = self._forward.compute(rows)
        self._rows.failed[[failure.slot for failure in forward.failed]] = True
        self._rows.commit_computed(rows)
        sampled = dict(zip(forward.slots, forward.first_logits, strict=True))
        forward.failed += self._fork(plan, sampled)
        drawn = self._sample(forward, sampled, step, host)
        self._state.note_computed(np.setdiff1d(rows.slots, drawn))
        host.failed += forward.failed
        host.prompt_logprobs = forward.prompt_logprobs

    def _count_drawn(self, pieces: list[Slots]) -> list[tuple[Slots, Slots]]:
        """The device has appended a token to each of these rows; so does the mirror, and learns
        later which. Slots and positions of the tokens."""
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
        self._state.fork([(fork.src, fork.dst) for fork in plan.forks])
        self._state.send(None)
        return failed

    def _sample(
        self, forward: Forward, sampled: dict[int, int], step: DeviceStep, host: HostPart
    ) -> Slots:
        """sampled: slots, each with the index of its logits. Those that the device draws for."""
        slots = np.fromiter(sampled, np.int64, len(sampled))
        index = np.fromiter(sampled.values(), np.int64, len(sampled))
        pieces: list[DrawnPiece] = []
        if len(slots):
            logits = forward.logits[0] if len(forward.logits) == 1 else torch.cat(forward.logits)
            on_device = self._draws_on_device(slots)
            if not on_device.all():
                self._draw_on_host(logits, slots[~on_device], index[~on_device], host)
                slots, index = slots[on_device], index[on_device]
            if len(slots):
                pieces, failed = self._draws.draw(logits, slots, index)
                self._rows.failed[[failure.slot for failure in failed]] = True
                host.failed += failed
        drawn = self._count_drawn([piece.slots for piece in pieces])
        logprobs = [piece.logprobs for piece in pieces]
        tensors = [piece.token_ids for piece in pieces]
        tensors += [tensor for _, tensor in forward.unfinished]
        for each in logprobs:
            tensors += () if each is None else each.tensors
        step.expect(
            drawn,
            [slots for slots, _ in forward.unfinished],
            self._queue.copy_out(tensors) if tensors else None,
            logprobs,
        )
        return np.concatenate([np.zeros(0, np.int64), *(piece.slots for piece in pieces)])

    def _draws_on_device(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Of each row, whether the device draws its token. Drafts are verified by the host."""
        return self._draws.serves(slots) & (self._rows.num_drafts[slots] == 0)

    def _draw_on_host(
        self, logits: torch.Tensor, slots: Slots, index: Slots, host: HostPart
    ) -> None:
        """All results before this step's are known."""
        counts = 1 + self._rows.num_drafts[slots]
        firsts = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) + np.repeat(index - firsts, counts)
        values = logits[self._queue.upload(places)].float().cpu()
        sample = self._host_draws.sample(values, slots, firsts)
        self._state.note_drawn(sample.drawn)
        host.drawn = sample.drawn
        host.candidates, host.logprobs = sample.candidates, sample.logprobs
        host.failed += sample.failed


def _sources(plan: StepPlan) -> Slots:
    """Rows that others branch off from."""
    forks = np.array([fork.src for fork in plan.forks], np.int64)
    return np.concatenate((forks, plan.start_fork_src.astype(np.int64)))
