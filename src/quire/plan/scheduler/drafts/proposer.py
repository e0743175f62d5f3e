"""Sources of guesses at the next tokens of one sequence."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.plan.scheduler.drafts.chosen import Slots
from quire.plan.scheduler.drafts.room import DraftRoom
from quire.plan.scheduler.sequence import Sequence
from quire.plan.scheduler.table import SequenceTable
from quire.plan.speculation import DraftMethods
from quire.protocol.step import DRAFT_OF_MODEL, IntArray

__all__ = ["DraftProposer", "MethodProposer", "guesses_of"]


class DraftProposer(Protocol):
    """Guesses tokens from integers alone. A wrong guess costs time, never a wrong token."""

    def propose(
        self, sequence: Sequence, known: IntArray, num_in_flight: int, max_drafts: int
    ) -> IntArray:
        """Guess at most `max_drafts` tokens, int32 [D]; none to decode as usual.

        known: int32 [N], the tokens whose values have arrived. num_in_flight: most tokens that the
            steps in flight can bring. The drafts follow all of these.
        """
        ...


class MethodProposer:
    """A `DraftProposer`: each sequence has a drafter by its request and the engine's settings."""

    def __init__(self, methods: DraftMethods, vocab_size: int) -> None:
        self._methods = methods
        self._vocab_size = vocab_size

    def propose(
        self, sequence: Sequence, known: IntArray, num_in_flight: int, max_drafts: int
    ) -> IntArray:
        """See `DraftProposer`. Nothing after a token that may end the sequence is guessed."""
        request = sequence.group.request
        if sequence.drafter is None:
            sequence.drafter = self._methods.drafter(request)
        most = min(max_drafts, self._methods.num_drafts)
        drafts = sequence.drafter.propose(known, num_in_flight, most)
        num_before = len(known) - len(request.prompt_token_ids) + num_in_flight
        for i, token in enumerate(drafts):
            if token == DRAFT_OF_MODEL:
                continue
            if not 0 <= token < self._vocab_size:
                return np.array(drafts[:i], np.int32)
            if request.is_stop(token, num_before + i + 1):
                return np.array(drafts[: i + 1], np.int32)
        return np.array(drafts, np.int32)


def guesses_of(
    proposer: DraftProposer,
    table: SequenceTable,
    room: DraftRoom,
    slots: Slots,
    left: int,
    *,
    is_shared: bool,
) -> dict[int, IntArray]:
    """Return the guesses by slot, for rows that may have some. is_shared: they share `left` drafts;
    else each of them may have so many."""
    found: dict[int, IntArray] = {}
    for slot in slots.tolist():
        most = room.of_row(slot, left)
        if most <= 0:
            continue
        known = table.known_tokens(slot)
        unknown = int(table.num_total[slot]) - len(known)
        guess = proposer.propose(table.at(slot), known, unknown, most)[:most]
        if len(guess):
            found[slot] = guess
            left -= len(guess) if is_shared else 0
    return found
