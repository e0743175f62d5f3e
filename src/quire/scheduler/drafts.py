"""Drafts: guesses at the next tokens of sequences, verified beside a step's certain work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.kv_cache import KVManager
from quire.protocol.step import IntArray, no_ints
from quire.scheduler.sequence import Sequence
from quire.scheduler.table import SequenceTable

__all__ = ["NO_DRAFTS", "ChosenDrafts", "DraftProposer", "Drafts"]

MAX_FORCED = 32
"""Tokens without alternative that a row computes in one step: each has logits of its own."""

Slots = npt.NDArray[np.int64]


def _no_slots() -> Slots:
    return np.zeros(0, np.int64)


class DraftProposer(Protocol):
    """Guesses tokens from integers alone. A wrong guess costs time, never a wrong token."""

    def propose(
        self, sequence: Sequence, known: IntArray, num_in_flight: int, max_drafts: int
    ) -> IntArray:
        """Guess at most `max_drafts` tokens, int32 [D]; none to decode as usual.

        known: int32 [N], the tokens whose values have arrived. num_in_flight: how many more the
            steps in flight bring, at most. The drafts follow all of these.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChosenDrafts:
    """slots [R] with `counts` [R] drafts each, at least one; token_ids: int32 [sum of counts]."""

    slots: Slots = field(default_factory=_no_slots)
    counts: Slots = field(default_factory=_no_slots)
    token_ids: IntArray = field(default_factory=no_ints)


NO_DRAFTS = ChosenDrafts()


class Drafts:
    """Tokens to which a grammar leaves no alternative, and guesses. Both are verified; the former
    are never rejected, so they cost one step together.

    Drafts take what is left of a step's tokens and of the blocks, so that no certain work waits for
    a guess. A recurrent state cannot be taken back to where the first wrong draft stood, so there
    are none for models that have one.

    takes_forced: whether grammars are asked; a test switches it off.
    """

    def __init__(
        self,
        table: SequenceTable,
        kv: KVManager,
        proposer: DraftProposer | None,
        max_num_batched_tokens: int,
    ) -> None:
        self._table = table
        self._kv = kv
        self._proposer = proposer if kv.states is None else None
        self._max_tokens = max_num_batched_tokens
        self.takes_forced = kv.states is None

    def choose(self, slots: Slots, tokens: Slots) -> ChosenDrafts:
        """Drafts of the rows that sample in a step in which `slots` compute `tokens`, with blocks
        for all of them."""
        if self._proposer is None:
            is_masked = self._table.is_masked[slots]
            if not self.takes_forced or not is_masked.any():
                return NO_DRAFTS
            asked, counts = slots[is_masked], tokens[is_masked]
        else:
            asked, counts = slots, tokens
        left = self._max_tokens - int(tokens.sum())
        found: dict[int, IntArray] = {}
        for slot in asked[self._may_draft(asked, counts)].tolist():
            guess = self._propose(slot, left)
            if len(guess):
                found[slot] = guess
                left -= len(guess)
        if not found:
            return NO_DRAFTS
        chosen = ChosenDrafts(
            np.fromiter(found, np.int64, len(found)),
            np.array([len(guess) for guess in found.values()], np.int64),
            np.concatenate(list(found.values())).astype(np.int32),
        )
        return chosen if self._give_blocks(chosen, slots, tokens) else NO_DRAFTS

    def _may_draft(self, slots: Slots, tokens: Slots) -> npt.NDArray[np.bool_]:
        """Which rows reach their last token, draw the next, and have no others branch off."""
        table = self._table
        reaches = table.num_computed[slots] + tokens == table.num_total[slots]
        alone = [not table.at(slot).group.may_branch for slot in slots.tolist()]
        return reaches & (table.draws[slots] == 1) & np.array(alone, np.bool_)

    def _propose(self, slot: int, left: int) -> IntArray:
        table = self._table
        known = table.known_tokens(slot)
        # The step draws one token more than it accepts drafts.
        room = int(table.max_total[slot] - table.num_total[slot]) - 1
        most = min(room, left)
        if most <= 0:
            return known[:0]
        sequence, unknown = table.at(slot), int(table.num_total[slot]) - len(known)
        forced = self._forced(sequence, known)[unknown:][: min(most, MAX_FORCED)]
        if len(forced) or self._proposer is None:
            return forced
        return self._proposer.propose(sequence, known, unknown, most)[:most]

    def _forced(self, sequence: Sequence, known: IntArray) -> IntArray:
        """What the grammar of a sequence leaves no alternative to, after the known tokens."""
        group = sequence.group
        if group.grammar is None or not self.takes_forced:
            return known[:0]
        try:
            if sequence.matcher is None:
                sequence.matcher = group.grammar.matcher()
            return sequence.matcher.forced(known[len(group.request.prompt_token_ids) :])
        except Exception:  # noqa: BLE001  the masks of this step will say it, and end the request
            return known[:0]

    def _give_blocks(self, chosen: ChosenDrafts, slots: Slots, tokens: Slots) -> bool:
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
