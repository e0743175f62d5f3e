"""The drafts of each step, from the first source that has any."""

from __future__ import annotations

from quire.plan.kv_cache import KVManager
from quire.plan.scheduler.drafts.chosen import NO_DRAFTS, ChosenDrafts, DraftTotals, Slots
from quire.plan.scheduler.drafts.forced import ForcedTokens
from quire.plan.scheduler.drafts.guesses import Guesses, record_of
from quire.plan.scheduler.drafts.proposer import DraftProposer, guesses_of
from quire.plan.scheduler.drafts.room import DraftRoom
from quire.plan.scheduler.sequence import Sequence
from quire.plan.scheduler.table import SequenceTable
from quire.plan.speculation import DraftMethods
from quire.protocol.request import EngineRequest
from quire.protocol.step import IntArray

__all__ = ["Drafts"]


class Drafts:
    """Tokens to which a grammar leaves no alternative, and guesses. Both are verified; the former
    are never rejected, so they cost one step together.

    A step has tokens of one kind or of the other. Steps pay nothing for guesses while no running
    sequence has any, nor for grammars while none has one. takes_forced: whether grammars are asked;
    a test switches it off.
    """

    def __init__(
        self,
        table: SequenceTable,
        kv: KVManager,
        proposer: DraftProposer | None,
        max_num_batched_tokens: int,
        methods: DraftMethods | None = None,
        vocab_size: int = 2**31,
    ) -> None:
        """proposer: source of drafts that are all verified. methods: methods that make drafts
        without a proposer; a policy says how many of them are verified. vocab_size: ids from there
        on are no drafts."""
        self._table = table
        self._room = DraftRoom(table, kv, max_num_batched_tokens)
        self._forced = ForcedTokens(table, self._room)
        self._proposer = proposer
        self._guesses: Guesses | None = None
        if methods is not None:
            self._guesses = Guesses(table, self._room, methods, vocab_size)
        self.totals = DraftTotals()
        self.takes_forced = True

    # --- requests -------------------------------------------------------------------------------

    def serves(self, request: EngineRequest) -> bool:
        """Return whether methods guess for a request."""
        return self._guesses is not None and self._guesses.serves(request)

    def ended(self, sequence: Sequence) -> None:
        """A sequence ends, and still has its tokens."""
        if self._guesses is not None:
            self._guesses.ended(sequence)

    # --- steps ----------------------------------------------------------------------------------

    @property
    def _by_methods(self) -> Guesses | None:
        """The guesses by methods, where some running sequence has any. Other steps do not pay for
        them."""
        is_off = not self._table.num_guessed or self._proposer is not None
        return None if is_off else self._guesses

    def await_results(self) -> bool:
        """Return whether the next step should be planned when the results in flight are there; see
        `Guesses`."""
        guesses = self._by_methods
        return guesses is not None and guesses.await_results()

    def choose(self, slots: Slots, tokens: Slots) -> ChosenDrafts:
        """Drafts of the rows that sample in a step in which `slots` compute `tokens`, with blocks
        for all of them."""
        if not len(slots):
            return NO_DRAFTS
        found: dict[int, IntArray] = {}
        if self._table.num_masked and self.takes_forced:
            found = self._forced.find(slots, tokens)
        are_forced = bool(found)
        if not found and self._proposer is not None:
            found = self._proposed(self._proposer, slots, tokens)
        elif not found and (guesses := self._by_methods) is not None:
            found = guesses.find(slots, tokens)
        if not found:
            return NO_DRAFTS
        chosen = ChosenDrafts.of(found, are_forced=are_forced)
        return chosen if self._room.give_blocks(chosen, slots, tokens) else NO_DRAFTS

    def _proposed(
        self, proposer: DraftProposer, slots: Slots, tokens: Slots
    ) -> dict[int, IntArray]:
        """Return guesses without a policy: rows share what room there is."""
        rows = slots[self._room.may_draft(slots, tokens)]
        left = self._room.of_step(slots, tokens)
        return guesses_of(proposer, self._table, self._room, rows, left, is_shared=True)

    def planned(self, now: float, tokens: Slots, drafts: ChosenDrafts, num_before: int) -> None:
        """A step is planned whose rows compute `tokens` [R] beside these drafts, with `num_before`
        steps in flight."""
        guesses = self._by_methods
        if guesses is not None:
            guesses.planned(now, tokens, drafts, num_before)
        elif self._guesses is not None and self._guesses.is_timed:
            self._guesses.lost()

    def idle(self) -> None:
        """Nothing can be planned now."""
        if self._guesses is not None:
            self._guesses.idle()

    def applied(self, seconds: float) -> None:
        """The result of the oldest step in flight was applied, which computed for `seconds`."""
        if self._guesses is not None:
            self._guesses.applied(seconds)

    def lost(self) -> None:
        """The steps in flight have no results."""
        if self._guesses is not None:
            self._guesses.lost()

    def verified(self, slots: Slots, num_planned: int, made: Slots, accepted: Slots) -> None:
        """Count that `accepted` [R] of the `made` [R] drafts of `slots` [R] were right, in a step
        that was planned with `num_planned`, those of rows that are gone meanwhile included."""
        has_any = made > 0
        rows = zip(*(each[has_any].tolist() for each in (slots, made, accepted)), strict=True)
        for slot, num_drafts, num_accepted in rows:
            self.totals.count(num_drafts, num_accepted)
            record_of(self._table.at(slot)).verified(num_drafts, num_accepted)
        if self._guesses is not None:
            self._guesses.verified(num_planned, int(accepted.sum()))
