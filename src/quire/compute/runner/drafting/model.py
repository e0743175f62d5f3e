"""Drafts by a model: made on the data side at the start of the step that verifies them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from quire.compute.runner.drafting.blocks import DraftBlocks
from quire.compute.runner.drafting.tokens import DraftDraws, rows_to_draft, warn_of_failure
from quire.compute.runner.graphs.mixed import MixedSteps
from quire.compute.runner.inputs import ModelInputs
from quire.compute.runner.rows import RowTable, ScheduledRows, Slots
from quire.ops.distributed import ALONE, Collectives, together
from quire.protocol.step import IntArray, StepPlan

__all__ = ["Build", "DraftEntries", "LayerDrafter", "ModelDrafter"]

Build = Callable[[ScheduledRows], ModelInputs]


@dataclass(frozen=True, slots=True)
class DraftEntries:
    """The entries of layers that draft. blocks: blocks of their K/V. num_computed [S]: entries of
    rows before a forward; its inputs are gathered with them in place of the rows' own."""

    rows: RowTable
    blocks: DraftBlocks
    num_computed: Slots


class LayerDrafter(ABC):
    """A `StepDrafter` by layers with K/V of their own, which have an entry per token.

    shift: token i + shift of a row is the last one that entry i reads.
    """

    shift = 0

    def __init__(
        self,
        entries: DraftEntries,
        build: Build,
        draw: DraftDraws,
        max_tokens: int,
        collectives: Collectives = ALONE,
    ) -> None:
        """build: gathers the rows' tokens and the layers' blocks. max_tokens: most tokens of one
        forward. collectives: connection to the ranks that make the same drafts."""
        self.rows = entries.rows
        self._collectives = collectives
        self._blocks, self._num_computed = entries.blocks, entries.num_computed
        self._build = build
        self._draw = draw
        self._max_tokens = max_tokens
        self._has_warned = False
        # Slots, the entries before their first guess, and how far they were computed.
        self._drafted = self._firsts = self._ends = np.zeros(0, np.int64)

    # --- what differs ---------------------------------------------------------------------------

    @abstractmethod
    def forward(self, slots: Slots, starts: Slots, counts: Slots) -> torch.Tensor:
        """Compute `counts` entries from `starts` of rows. The logits [R, V] after the last one of
        each."""

    def follow(self, plan: StepPlan) -> None:
        """Follow a plan's difference, after the rows have."""
        self._blocks.apply(plan)

    def kept_after_step(self, slots: Slots, firsts: Slots) -> Slots:
        """Return how many entries of each row [R] are right after its step, before which `firsts`
        [R] were certain."""
        del firsts
        return self.rows.num_computed[slots]

    def may_draft(self, slots: Slots, starts: Slots, ends: Slots) -> npt.NDArray[np.bool_]:
        """Return which rows [R] have what is needed for entries `starts` to `ends`."""
        del starts, ends
        return np.ones(len(slots), np.bool_)

    # --- what does not --------------------------------------------------------------------------

    def settle(self) -> None:
        """Forget the K/V of rejected drafts once the last step is over. Before the
        next plan is applied."""
        if len(self._drafted):
            kept = self.kept_after_step(self._drafted, self._firsts)
            self._blocks.cut(self._drafted, kept, self._ends)
            self._drafted = self._drafted[:0]

    def propose(self, plan: StepPlan) -> None:
        """See `StepDrafter`."""
        self.follow(plan)
        rows, slots = self.rows, rows_to_draft(plan, self.rows)
        if not len(slots):
            return
        ends = rows.num_tokens[slots] - self.shift
        known = np.array([self._blocks.num_computed(slot) for slot in slots.tolist()], np.int64)
        starts = np.minimum(known, ends - 1)  # one at least gives the first guess
        has_all = self.may_draft(slots, starts, ends)
        slots, starts, ends = self._without(slots, ~has_all), starts[has_all], ends[has_all]
        self._drafted, self._firsts, self._ends = slots, ends, ends + rows.num_drafts[slots]
        try:
            together(self._collectives, lambda: self._make(slots, starts, ends))
        except Exception:  # noqa: BLE001  a guess must not cost a request
            if not self._has_warned:
                self._has_warned = True
                warn_of_failure()
            self._without(slots, np.ones(len(slots), np.bool_))
            self._blocks.cut(slots, starts, self._ends)  # ranks that came further go on alike

    def inputs_of(self, slots: Slots, starts: Slots, counts: Slots) -> ModelInputs:
        """Gather the inputs of a forward over these entries."""
        self._num_computed[slots] = starts
        samples = np.ones(len(slots), np.bool_)
        return self._build(ScheduledRows(slots, starts, counts, np.zeros_like(counts), samples))

    def _without(self, slots: Slots, is_out: npt.NDArray[np.bool_]) -> Slots:
        """Take the drafts of some rows away. The other rows."""
        self.rows.num_drafts[slots[is_out]] = 0
        return slots[~is_out]

    def _make(self, slots: Slots, starts: Slots, ends: Slots) -> None:
        """Draft for rows of which entries `starts` to `ends` [R] are to be computed first."""
        rows, turn = self.rows, 0
        while len(slots):
            token_ids = self._compute(slots, starts, ends)
            kept = token_ids >= 0
            slots = self._without(slots, ~kept)
            rows.token_ids[slots, ends[kept] + self.shift] = token_ids[kept]
            starts, ends, turn = ends[kept], ends[kept] + 1, turn + 1
            goes_on = rows.num_drafts[slots] > turn
            slots, starts, ends = slots[goes_on], starts[goes_on], ends[goes_on]

    def _compute(self, slots: Slots, starts: Slots, ends: Slots) -> IntArray:
        """Compute entries `starts` to `ends` [R] of rows, a few at a time if they are many. The
        tokens drawn after them, int32 [R], negative in a row that has none."""
        drawn = np.full(len(slots), -1, np.int32)
        starts = starts.copy()
        while (starts < ends).any():
            room = self._max_tokens - np.cumsum(ends - starts) + (ends - starts)
            counts = np.clip(room, 0, ends - starts)
            part = counts > 0
            logits = self.forward(slots[part], starts[part], counts[part])
            self._count(slots[part], starts[part], counts[part])
            starts += counts
            is_over = starts[part] == ends[part]
            index = part.nonzero()[0][is_over]
            if len(index):
                of_over = logits[torch.from_numpy(is_over.nonzero()[0])]
                places = ends[index] + self.shift
                drawn[index] = self._draw(of_over, slots[index], places)
        return drawn

    def _count(self, slots: Slots, starts: Slots, counts: Slots) -> None:
        """Entries of rows were computed."""
        ends = starts + counts
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            self._blocks.fill(slot, start, end)


class ModelDrafter(LayerDrafter):
    """Drafts by a model of its own, which reads tokens alone."""

    def __init__(
        self,
        steps: MixedSteps,
        entries: DraftEntries,
        draw: DraftDraws,
        max_tokens: int,
        vocab_size: int,
        media_token: int,
    ) -> None:
        """steps: forwards of the draft model. vocab_size: number of its tokens; ids from there on
        are of media, and are read as `media_token`. Other arguments: see `LayerDrafter`."""
        super().__init__(entries, steps.build, draw, max_tokens)
        self._steps = steps
        self._vocab_size, self._media_token = vocab_size, media_token

    def forward(self, slots: Slots, starts: Slots, counts: Slots) -> torch.Tensor:
        inputs = self.inputs_of(slots, starts, counts)
        if self.rows.media:
            inputs.token_ids.masked_fill_(inputs.token_ids >= self._vocab_size, self._media_token)
        step = replace(inputs.step, wanted_tokens=inputs.last_token)
        hidden = self._steps.forward(inputs.token_ids, inputs.positions, step)
        return self._steps.logits(hidden)
