"""Tokens to which a grammar leaves no alternative."""

from __future__ import annotations

from quire.base.platform.interrupts import is_ctrl_c
from quire.plan.scheduler.drafts.chosen import Slots
from quire.plan.scheduler.drafts.room import DraftRoom
from quire.plan.scheduler.table import SequenceTable
from quire.protocol.step import IntArray

__all__ = ["ForcedTokens"]

MAX_FORCED = 32
"""A row computes so many tokens without alternative in a step: each has logits of its own."""

MOST_FORCED_RESTS = 4
"""Steps for which a grammar that leaves alternatives is not asked again, at most: asking takes
time, and so few are little of a long run of tokens without any."""


class ForcedTokens:
    """Asks the grammars of rows. Those without one pay nothing."""

    def __init__(self, table: SequenceTable, room: DraftRoom) -> None:
        self._table = table
        self._room = room

    def find(self, slots: Slots, tokens: Slots) -> dict[int, IntArray]:
        """Return tokens without alternative, by slot."""
        is_masked = self._table.is_masked[slots]
        left = self._room.of_step(slots, tokens)
        slots, tokens = slots[is_masked], tokens[is_masked]
        found: dict[int, IntArray] = {}
        for slot in slots[self._room.may_draft(slots, tokens)].tolist():
            forced = self._of_row(slot, left)
            if len(forced):
                found[slot] = forced
                left -= len(forced)
        return found

    def _of_row(self, slot: int, left: int) -> IntArray:
        """Return the tokens to which a sequence's grammar leaves no alternative, after those in
        flight."""
        table, sequence = self._table, self._table.at(slot)
        group, known = sequence.group, table.known_tokens(slot)
        most = min(self._room.of_row(slot, left), MAX_FORCED)
        if group.grammar is None or most <= 0:
            return known[:0]
        if sequence.forced_rests:
            sequence.forced_rests -= 1
            return known[:0]
        unknown = int(table.num_total[slot]) - len(known)
        try:
            if sequence.matcher is None:
                sequence.matcher = group.grammar.matcher()
            forced = sequence.matcher.forced(known[len(group.request.prompt_token_ids) :])
        except BaseException as error:  # the masks of this step will say it, and end the request
            if is_ctrl_c(error):
                raise
            return known[:0]
        if len(forced):
            sequence.forced_patience = 0
        else:
            sequence.forced_rests = sequence.forced_patience
            sequence.forced_patience = min(2 * sequence.forced_patience or 1, MOST_FORCED_RESTS)
        return forced[unknown:][:most]
