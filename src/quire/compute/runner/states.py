"""Recurrent states of rows, checkpoints of them, and tokens that they may have to see again."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from quire.base.errors import EngineError
from quire.compute.attention import StateInputs
from quire.compute.layers.recurrent import RecurrentLayers
from quire.compute.runner.rows import RowTable, ScheduledRows, Slots
from quire.config.memory.plan import FEWEST_DRAFTS
from quire.protocol.step import EnterRow, IntArray, StepPlan

__all__ = ["RecurrentStates"]


class RecurrentStates:
    """States in the memory of the host, each with those of all layers in one piece. A row has two
    places, which `RowTable` names; behind these lie the checkpoints. Nobody clears a place: layers
    take zeros for rows without computed tokens.

    A step keeps the inputs of the tokens of rows with drafts. If a row does not accept all of its
    drafts, its layers compute the accepted tokens again, from the state before the step."""

    def __init__(self, rows: RowTable, num_checkpoints: int, layers: RecurrentLayers) -> None:
        """layers: the layers of the model that have states, on this rank."""
        self._rows, self._layers = rows, layers
        max_rows = len(rows.num_tokens)
        self._first, num_kept = 2 * max_rows, max_rows + FEWEST_DRAFTS
        shape = (self._first + num_checkpoints, layers.state_bytes)
        self._places = torch.empty(shape, dtype=torch.uint8)
        self._kept = torch.empty((num_kept, layers.kept_bytes), dtype=torch.uint8)
        self._keep = np.full(max_rows, -1, np.int64)
        self._kept_from = torch.from_numpy(self._keep)
        self._read = torch.from_numpy(rows.read_state)
        self._write = torch.from_numpy(rows.write_state)
        self._num_computed = torch.from_numpy(rows.num_computed)

    @property
    def checkpoints(self) -> torch.Tensor:
        """The memory of the checkpoints, uint8 [C, state_bytes]."""
        return self._places[self._first :]

    def inputs(self, slots: torch.Tensor, *, keeps: bool) -> StateInputs:
        """Return what layers read of the rows in `slots` [R], in memory that stays. keeps: whether
        rows may have drafts."""
        kept = (self._kept, self._kept_from) if keeps else ()
        return StateInputs(self._places, self._read, self._write, self._num_computed, slots, *kept)

    def keep(self) -> None:
        """Give the tokens of rows with drafts their places, before the step computes them."""
        self._keep[:] = -1
        drafted = np.flatnonzero(self._rows.num_drafts)
        if not len(drafted):
            return
        certain = self._rows.standing[drafted]
        counts = certain + self._rows.num_drafts[drafted]
        if (certain != 1).any() or counts.sum() > len(self._kept):
            raise EngineError(
                f"the plan has drafts beside {certain.tolist()} tokens of rows with recurrent "
                f"states, {int(counts.sum())} tokens in all: it may have them beside one token, "
                f"and {len(self._kept)} in all"
            )
        self._keep[drafted] = np.cumsum(counts) - counts

    def stash(self, plan: StepPlan) -> None:
        """Keep the states of rows that leave, before the plan is applied to the rows."""
        self._save(plan.stash_slot.astype(np.int64), plan.stash_checkpoint)

    def enter(self, rows: Iterable[EnterRow]) -> None:
        """Let rows start from their checkpoints."""
        for row in rows:
            if row.checkpoint is not None:
                place = self._rows.read_state[row.slot]
                self._places[place] = self._places[self._first + row.checkpoint]

    def fork(self, src: int, dst: int) -> None:
        """Give row `dst` the state of row `src`."""
        read = self._rows.read_state
        self._places[read[dst]] = self._places[read[src]]

    def save(self, plan: StepPlan) -> None:
        """Keep states that the plan asks for, after a step in which no row has drafts."""
        places = plan.save_drafts == 0
        self._save(plan.save_slot[places].astype(np.int64), plan.save_checkpoint[places])

    def settle(self, plan: StepPlan, rows: ScheduledRows) -> None:
        """Take the rows of a step back to the last draft that each accepted, and keep the states
        that the plan asks for, where a row came so far. rows: the scheduled ones, as they were
        before the step."""
        table = self._rows
        if not (len(plan.draft_slot) and table.num_drafts.any()):
            self.save(plan)
            return
        accepted = table.num_drafts - table.num_rejected
        back = rows.slots[table.num_rejected[rows.slots] > 0]
        saved = plan.save_slot.astype(np.int64)
        is_within = (plan.save_drafts < accepted[saved]) & (self._keep[saved] >= 0)
        within = saved[is_within]
        slots = np.concatenate((back, within))
        if len(slots):
            checkpoints = self._first + plan.save_checkpoint[is_within].astype(np.int64)
            drafts = plan.save_drafts[is_within].astype(np.int64)
            counts = np.concatenate((accepted[back], drafts)) + 1
            self._replay(slots, counts, np.concatenate((table.read_state[back], checkpoints)), rows)
        is_last = plan.save_drafts == accepted[saved]
        self._save(saved[is_last], plan.save_checkpoint[is_last])

    def _replay(self, slots: Slots, counts: Slots, to: Slots, rows: ScheduledRows) -> None:
        """Compute the first `counts` [N] tokens of the step again for rows `slots` [N], from their
        states before it to places `to` [N]. The rows have committed: they write there next."""
        before = np.zeros(len(self._keep), np.int64)
        before[rows.slots] = rows.num_computed
        starts = np.concatenate(([0], np.cumsum(counts)))
        places = np.repeat(self._keep[slots] - starts[:-1], counts) + np.arange(starts[-1])
        columns = (self._rows.write_state[slots], to, before[slots], np.arange(len(slots)))
        inputs = StateInputs(self._places, *map(torch.from_numpy, columns))
        kept = self._kept[torch.from_numpy(places)]
        self._layers.replay(kept, inputs, torch.from_numpy(starts.astype(np.int32)))

    def _save(self, slots: Slots, checkpoints: IntArray) -> None:
        """Keep the states that rows [N] have committed in checkpoints [N]."""
        if len(slots):
            places = torch.from_numpy(self._rows.read_state[slots])
            to = torch.from_numpy(checkpoints.astype(np.int64)) + self._first
            self._places[to] = self._places[places]
