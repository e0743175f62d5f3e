"""Room for drafts: the rows that may have some, and what certain work leaves of a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.config.memory.plan import FEWEST_DRAFTS
from quire.plan.kv_cache import KVManager
from quire.plan.scheduler.drafts.chosen import ChosenDrafts, Slots
from quire.plan.scheduler.table import SequenceTable

__all__ = ["DraftRoom"]


class DraftRoom:
    """Tokens and blocks that steps leave to drafts, so that no certain work waits for a guess."""

    def __init__(self, table: SequenceTable, kv: KVManager, max_num_batched_tokens: int) -> None:
        self._table = table
        self._kv = kv
        self._max_tokens = max_num_batched_tokens
        self._has_recurrence = kv.states is not None

    def of_step(self, slots: Slots, tokens: Slots) -> int:
        """Drafts that a step may have in all in which `slots` compute `tokens`."""
        most = max(len(self._table.live) - len(slots), FEWEST_DRAFTS)
        return min(self._max_tokens - int(tokens.sum()), most)

    def of_row(self, slot: int, left: int) -> int:
        """Drafts that a row may have, `left` in all. The step draws one token more than it accepts
        drafts."""
        table = self._table
        return min(int(table.max_total[slot] - table.num_total[slot]) - 1, left)

    def may_draft(self, slots: Slots, tokens: Slots) -> npt.NDArray[np.bool_]:
        """Mark the rows that reach their last token, draw the next, and have no others branch off.
        One with a recurrent state has drafts only beside a single certain token: the inputs of the
        tokens that may be taken back are kept, and those of a chunk would take too much memory."""
        table = self._table
        reaches = table.num_computed[slots] + tokens == table.num_total[slots]
        may_draft = reaches & (table.draws[slots] == 1)
        if self._has_recurrence:
            may_draft &= tokens == 1
        for i in may_draft.nonzero()[0].tolist():
            may_draft[i] = not table.at(int(slots[i])).group.may_branch
        return may_draft

    def give_blocks(self, chosen: ChosenDrafts, slots: Slots, tokens: Slots) -> bool:
        """Allocate for the drafts, if each sequence that computes could still grow by a block in
        every group: a guess must not have anybody preempted."""
        base = np.zeros(len(self._table.live), np.int64)
        base[slots] = tokens
        ends = self._table.num_computed[chosen.slots] + base[chosen.slots] + chosen.counts
        room = self._kv.pool.num_available - len(slots) * len(self._kv.layout.groups)
        most = sum(self._kv.layout.blocks_for(count) for count in chosen.counts.tolist())
        if most > room:
            return False
        return self._kv.grow(chosen.slots, self._table.first_query(chosen.slots), ends)
