"""Drafts by Medusa's heads, from the hidden state of the last verified token."""

from __future__ import annotations

import numpy as np

from quire.compute.models.heads import MedusaHeads
from quire.compute.runner.drafting.states import LastStates
from quire.compute.runner.drafting.tokens import DraftDraws, rows_to_draft, warn_of_failure
from quire.compute.runner.rows import RowTable, Slots
from quire.protocol.step import StepPlan

__all__ = ["MedusaDrafter"]


class MedusaDrafter:
    """A `StepDrafter`. A row has drafts if its last step computed it up to its last token: not
    right after it came or came back."""

    def __init__(
        self, heads: MedusaHeads, rows: RowTable, states: LastStates, draw: DraftDraws
    ) -> None:
        self._heads = heads
        self._rows = rows
        self._states = states
        self._draw = draw
        self._has_warned = False

    def settle(self) -> None:
        """Nothing is left of the last step but states."""

    def propose(self, plan: StepPlan) -> None:
        """See `StepDrafter`."""
        self._states.apply(plan)
        slots, num_drafts = rows_to_draft(plan, self._rows), self._rows.num_drafts
        if not len(slots):
            return
        is_there = self._states.has(slots)
        num_drafts[slots[~is_there]] = 0
        slots = slots[is_there]
        try:
            self._make(slots)
        except Exception:  # noqa: BLE001  a guess must not cost a request
            num_drafts[slots] = 0
            if not self._has_warned:
                self._has_warned = True
                warn_of_failure()

    def _make(self, slots: Slots) -> None:
        rows = self._rows
        wanted = np.minimum(rows.num_drafts[slots], self._heads.num_heads)
        rows.num_drafts[slots] = 0
        for head in range(int(wanted.max(initial=0))):
            goes_on = wanted > head
            slots, wanted = slots[goes_on], wanted[goes_on]
            places = rows.num_tokens[slots] + head
            logits = self._heads.logits(head, self._states.of(slots))
            token_ids = self._draw(logits, slots, places)
            kept = token_ids >= 0
            slots, wanted = slots[kept], wanted[kept]
            rows.token_ids[slots, places[kept]] = token_ids[kept]
            rows.num_drafts[slots] += 1
