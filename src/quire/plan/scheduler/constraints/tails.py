"""Tokens that a verdict refuses: rows drop them, and get the replacements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.plan.scheduler.state import SchedulerState

__all__ = ["TailRewinds"]


@dataclass(slots=True)
class _Rewind:
    """A row that waits for the results of steps that computed with refused tokens. num_kept: tokens
    of the row that stay; no known token follows them. num_refused: tokens that only the row has.
    num_computed: lower bound of the row's computed tokens. last_step: the last step whose result
    must arrive."""

    slot: int
    generation: int
    num_kept: int
    num_refused: int
    num_computed: int
    last_step: int


class TailRewinds:
    """Rewinds of refused tokens. A row's length is certain only when no step with it is in flight.
    So a row with refused tokens computes nothing until then, and the next plan rewinds it."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._waiting: list[_Rewind] = []

    def begin(self, slot: int, num_kept: int, num_computed: int, last_step: int) -> None:
        """Keep the first `num_kept` known tokens of a row, before others follow, and stop the slot.
        It resumes when the result of `last_step` has been applied."""
        table = self._state.table
        generation, num_known = int(table.generation[slot]), int(table.num_known[slot])
        for rewind in self._waiting:
            if (rewind.slot, rewind.generation) == (slot, generation):
                num_more = max(rewind.num_kept - num_kept, 0)
                rewind.num_kept -= num_more
                rewind.num_refused += num_more
                rewind.last_step = last_step
                return
        refused = num_known - num_kept
        self._waiting.append(_Rewind(slot, generation, num_kept, refused, num_computed, last_step))

    def may_stay(self, slot: int, num_kept: int) -> bool:
        """Return whether a row can be rewound in place to its first `num_kept` tokens. It cannot if
        a later token is in a block that is published by name, or if a window has released blocks
        that the kept tokens need. A recurrent state cannot be rewound."""
        state, kv = self._state, self._state.kv
        if kv.states is not None or any(group.window is not None for group in kv.layout.groups):
            return False
        num_named = len(state.table.at(slot).names) * kv.block_size
        return num_named <= num_kept and not state.builder.is_entering(slot)

    def count(self, slots: Iterable[int], counts: Iterable[int]) -> None:
        """Note that rows of these slots were given tokens that are not wanted any more."""
        given = dict(zip(slots, counts, strict=True))
        for rewind in self._waiting:
            rewind.num_refused += given.get(rewind.slot, 0)

    def settle(self, step_id: int) -> None:
        """Note that the result of this step was applied; rows that waited for it resume."""
        due = [rewind for rewind in self._waiting if rewind.last_step <= step_id]
        if due:
            self._waiting = [rewind for rewind in self._waiting if rewind.last_step > step_id]
            for rewind in due:
                self._rewind(rewind)

    def _rewind(self, rewind: _Rewind) -> None:
        """Tell the row, unless the sequence has left it."""
        table, slot = self._state.table, rewind.slot
        if table.generation[slot] != rewind.generation:
            return
        num_known, num_kept = int(table.num_known[slot]), rewind.num_kept
        num_in_row = num_kept + rewind.num_refused
        num_computed = min(num_in_row - 1, num_kept, rewind.num_computed)
        tokens: list[int] = table.token_ids[slot, num_kept:num_known].tolist()
        table.go_on(slot, num_computed)
        slots: npt.NDArray[np.int64] = np.array([slot])
        self._state.kv.give_back(slots, slots * 0 + num_computed)
        self._state.builder.replace_tail(slot, num_in_row - num_kept, tokens)

    def forget(self) -> None:
        """Forget all rewinds: the steps in flight are lost, and their rows with them."""
        self._waiting.clear()
