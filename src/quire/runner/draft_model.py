"""Drafts by a model: made on the data side at the start of the step that verifies them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from quire.models import CausalLM
from quire.protocol.step import DRAFT_OF_MODEL, IntArray, StepPlan
from quire.runner.draft_blocks import DraftBlocks
from quire.runner.inputs import InputGatherer
from quire.runner.rows import RowTable, ScheduledRows, Slots
from quire.sampling import Draw, SamplingState

__all__ = ["ModelDrafter"]

_log = logging.getLogger("quire.runner")

DrawTokens = Callable[[torch.Tensor, Slots, Slots], IntArray]


class ModelDrafter:
    """Fills in the drafts that a plan leaves to a model. It draws them by the parameters and with
    the noise of their rows, so that a draft model that agrees with the model draws what that will.
    Edits of logits are left out: they make drafts worse, never wrong.

    A row whose drafts cannot be made is computed without them.
    """

    def __init__(
        self,
        model: CausalLM,
        rows: RowTable,
        blocks: DraftBlocks,
        inputs: InputGatherer,
        num_computed: Slots,
        sampling: SamplingState,
        draw: Draw,
        max_tokens: int,
    ) -> None:
        """inputs: over the rows' tokens and the draft model's blocks, with `num_computed` [S] in
        place of the rows' own. draw: the operation. max_tokens: of one forward."""
        self._model = model
        self._rows = rows
        self._blocks = blocks
        self._inputs = inputs
        self._num_computed = num_computed
        self._sampling = sampling
        self._draw = draw
        self._max_tokens = max_tokens
        self._has_warned = False
        self._drafted = self._ends = np.zeros(0, np.int64)  # slots, and how far they were computed

    def settle(self) -> None:
        """The last step is over: what was computed of its rejected drafts is forgotten. Before the
        next plan is applied."""
        if len(self._drafted):
            self._blocks.cut(self._drafted, self._ends)
            self._drafted = self._drafted[:0]

    def propose(self, plan: StepPlan) -> None:
        """Make the drafts of a plan that was applied to the rows."""
        self._blocks.apply(plan)
        rows = self._rows
        of_model = plan.draft_slot[plan.draft_token == DRAFT_OF_MODEL]
        slots = np.unique(of_model).astype(np.int64)
        if not len(slots):
            return
        slots = self._without(slots, rows.failed[slots])
        ends = rows.num_tokens[slots]
        self._drafted, self._ends = slots, ends + rows.num_drafts[slots]
        starts = np.array([self._blocks.num_computed(slot) for slot in slots.tolist()], np.int64)
        try:
            self._make(slots, starts, ends)
        except Exception:  # noqa: BLE001  a guess must not cost a request
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the draft model failed; steps go on without drafts", exc_info=True)
            self._without(slots, np.ones(len(slots), np.bool_))

    def _without(self, slots: Slots, is_out: np.ndarray) -> Slots:
        """Take the drafts of some rows away. The other rows."""
        self._rows.num_drafts[slots[is_out]] = 0
        return slots[~is_out]

    def _make(self, slots: Slots, starts: Slots, ends: Slots) -> None:
        """Draft for rows of which tokens `starts` to `ends` [R] are to be computed first."""
        rows, turn = self._rows, 0
        while len(slots):
            token_ids = self._compute(slots, starts, ends)
            kept = token_ids >= 0
            slots = self._without(slots, ~kept)
            rows.token_ids[slots, ends[kept]] = token_ids[kept]
            starts, ends, turn = ends[kept], ends[kept] + 1, turn + 1
            goes_on = rows.num_drafts[slots] > turn
            slots, starts, ends = slots[goes_on], starts[goes_on], ends[goes_on]

    def _compute(self, slots: Slots, starts: Slots, ends: Slots) -> IntArray:
        """Compute tokens `starts` to `ends` [R] of rows, a few at a time if they are many. The
        tokens drawn after them, int32 [R], negative in a row that has none."""
        drawn = np.full(len(slots), -1, np.int32)
        starts = starts.copy()
        while (starts < ends).any():
            room = self._max_tokens - np.cumsum(ends - starts) + (ends - starts)
            counts = np.clip(room, 0, ends - starts)
            part = counts > 0
            logits = self._forward(slots[part], starts[part], counts[part])
            starts += counts
            is_over = starts[part] == ends[part]
            index = part.nonzero()[0][is_over]
            if len(index):
                of_over = logits[torch.from_numpy(is_over.nonzero()[0])]
                drawn[index] = self._draw_tokens(of_over, slots[index], ends[index])
        return drawn

    def _forward(self, slots: Slots, starts: Slots, counts: Slots) -> torch.Tensor:
        """Return the logits [R, V] after the last of these tokens of each row."""
        self._num_computed[slots] = starts
        samples = np.ones(len(slots), np.bool_)
        rows = ScheduledRows(slots, starts, counts, np.zeros_like(counts), samples)
        buffers = self._inputs.buffers(int(counts.sum()), len(slots), empty=True)
        inputs = self._inputs.fill(rows, buffers)
        step = replace(inputs.step, wanted_tokens=inputs.last_token)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, step)
        for slot, start, count in zip(
            slots.tolist(), starts.tolist(), counts.tolist(), strict=True
        ):
            self._blocks.fill(slot, start, start + count)
        return self._model.logits(hidden)

    def _draw_tokens(self, logits: torch.Tensor, slots: Slots, positions: Slots) -> IntArray:
        columns = self._sampling.draw_parameters(slots)
        parameters = [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]
        index = torch.arange(len(slots))
        return self._draw(logits, index, *parameters, torch.from_numpy(positions)).numpy()
