"""Rows of a device that computes nothing. They have the counts alone of the real rows
(`quire.compute.runner.rows`), since tokens and block tables change no time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.protocol.step import StepPlan

__all__ = ["ComputedRows", "RowCounts"]

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Rows of a step: slots, num_computed before it, num_tokens, int64 [R]; drawing, int64 [D]: the
    slots that reach their last token."""

    slots: Slots
    num_computed: Slots
    num_tokens: Slots
    drawing: Slots


class RowCounts:
    """num_total, num_computed, standing (tokens per step), num_candidates: int64 [slots]."""

    def __init__(self, max_num_seqs: int) -> None:
        self.num_total = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.standing = np.zeros(max_num_seqs, np.int64)
        self.num_candidates = np.zeros(max_num_seqs, np.int64)
        self.has_beams = False
        self._slots = np.zeros(0, np.int64)
        self._num_tokens = self._slots

    def compute(self, plan: StepPlan) -> ComputedRows:
        """Take over a plan, `forks` excepted, and compute its rows. EngineError if the plan
        computes what is not there, or asks for what no simulated device has."""
        if not plan.keeps_rows:
            self._change(plan)
        slots, tokens = self._slots, self._num_tokens
        computed = self.num_computed[slots]
        ends = computed + tokens
        total = self.num_total[slots]
        samples = ends == total
        drawing = slots
        if not np.logical_and.reduce(samples):
            if (ends > total).any():
                bad = int(np.argmax(ends > total))
                raise EngineError(
                    f"the plan computes up to token {int(ends[bad])} of slot {int(slots[bad])}, "
                    f"which has {int(total[bad])}"
                )
            drawing = slots[samples]
        self.num_computed[slots] = ends
        return ComputedRows(slots, computed, tokens, drawing)

    def fork(self, src: int, dst: int) -> None:
        """Make `dst` a copy of `src` as it is now."""
        self._copy(src, dst)
        self._list()

    def append(self, slots: Slots) -> None:
        """Give each of these rows a token."""
        self.num_total[slots] += 1

    def _change(self, plan: StepPlan) -> None:
        if len(plan.draft_slot):
            raise EngineError("the plan has drafts, and a simulated device verifies none")
        self.standing[plan.leave] = 0
        for row in plan.enter:
            if row.pooling is not None:
                raise EngineError(f"slot {row.slot} pools, and a simulated device has no vectors")
            self.num_total[row.slot] = len(row.token_ids)
            self.num_computed[row.slot] = row.num_computed_tokens
            self.standing[row.slot] = 0
            self.num_candidates[row.slot] = row.num_candidates
            self.has_beams |= row.num_candidates > 0
        for piece in plan.extend:
            self.num_total[piece.slot] += len(piece.token_ids)
        if len(plan.rewind_slot):
            slots = plan.rewind_slot
            self.num_total[slots] -= plan.rewind_tokens
            self.num_computed[slots] = np.minimum(self.num_computed[slots], self.num_total[slots])
        for src, dst in zip(plan.start_fork_src, plan.start_fork_dst, strict=True):
            self._copy(int(src), int(dst))
            self.standing[dst] = 0
        if len(plan.append_slot):
            np.add.at(self.num_total, plan.append_slot, 1)
        self.standing[plan.delta_slot] = plan.delta_tokens
        self._list()

    def _copy(self, src: int, dst: int) -> None:
        for column in (self.num_total, self.num_computed, self.standing, self.num_candidates):
            column[dst] = column[src]

    def _list(self) -> None:
        self._slots = np.flatnonzero(self.standing > 0)
        self._num_tokens = self.standing[self._slots]
