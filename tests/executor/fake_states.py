"""Recurrent states of the fake model; see `tests.executor.fake`."""

from __future__ import annotations

import numpy as np

from quire.compute.runner.rows import RowTable
from quire.protocol.step import EnterRow, StepPlan
from tests.executor.fake_model import INITIAL_STATE, Words

__all__ = ["FakeStates"]


class FakeStates:
    """Recurrent states of rows, in the places that the rows name, and checkpoints of them."""

    def __init__(self, rows: RowTable, num_checkpoints: int, rng: np.random.Generator) -> None:
        self._rows = rows
        self._rng = rng
        self._states = self._noise(2 * len(rows.num_tokens))
        self._checkpoints = self._noise(num_checkpoints)

    def _noise(self, count: int) -> Words:
        return self._rng.integers(0, 2**63, count).astype(np.uint64)

    def lose_all(self) -> None:
        self._states = self._noise(len(self._states))
        self._checkpoints = self._noise(len(self._checkpoints))

    def stash(self, plan: StepPlan) -> None:
        """Keep the states of rows that leave, before the plan is applied."""
        pairs = zip(plan.stash_slot.tolist(), plan.stash_checkpoint.tolist(), strict=True)
        for slot, checkpoint in pairs:
            self._checkpoints[checkpoint] = self.read(slot)

    def enter(self, row: EnterRow) -> None:
        place = self._rows.read_state[row.slot]
        if row.checkpoint is None:
            self._states[place] = INITIAL_STATE
        else:
            self._states[place] = self._checkpoints[row.checkpoint]

    def fork(self, src: int, dst: int) -> None:
        read = self._rows.read_state
        self._states[read[dst]] = self._states[read[src]]

    def read(self, slot: int) -> int:
        return int(self._states[self._rows.read_state[slot]])

    def write(self, slot: int, state: int) -> None:
        self._states[self._rows.write_state[slot]] = state

    def write_noise(self, slot: int) -> None:
        self.write(slot, int(self._noise(1)[0]))

    def settle(self, plan: StepPlan, after: dict[int, list[int]]) -> None:
        """Take rows back to before the drafts that they did not accept, and keep the states that
        the plan asks for. after: states after each token of the step, by slot."""
        rows = self._rows
        for slot in np.unique(plan.draft_slot).tolist():
            if slot in after and (rejected := int(rows.num_rejected[slot])):
                self._states[rows.read_state[slot]] = after[slot][-1 - rejected]
        saves = (plan.save_slot, plan.save_checkpoint, plan.save_drafts)
        for slot, checkpoint, count in zip(*(each.tolist() for each in saves), strict=True):
            accepted = int(rows.num_drafts[slot] - rows.num_rejected[slot])
            if count == accepted:
                self._checkpoints[checkpoint] = self.read(slot)
            elif count < accepted and slot in after:  # else it has failed before
                last = -1 - int(rows.num_drafts[slot]) + count
                self._checkpoints[checkpoint] = after[slot][last]
