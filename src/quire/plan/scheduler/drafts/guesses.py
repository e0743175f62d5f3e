"""Guesses by methods: asked for where they may pay, and as many are verified as do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.plan.scheduler.drafts.chosen import ChosenDrafts, Slots
from quire.plan.scheduler.drafts.proposer import MethodProposer, guesses_of
from quire.plan.scheduler.drafts.room import DraftRoom
from quire.plan.scheduler.sequence import Sequence
from quire.plan.scheduler.table import SequenceTable
from quire.plan.speculation import Acceptance, DraftMethods, DraftPolicy
from quire.plan.speculation.policy import RESTS
from quire.plan.speculation.step_times import DecodeStep, StepTimes
from quire.protocol.request import EngineRequest
from quire.protocol.step import IntArray

__all__ = ["Guesses", "record_of"]

MOST_MISSES, ROWS_PER_MISS = 4, 4
"""Period in which a sequence is asked again of which nothing could be guessed: one step more for so
many that compute, since asking each of them takes time beside the step."""


@dataclass(frozen=True, slots=True)
class Offers:
    """found: guesses by slot. counts: number of guesses to verify for each slot; None if it cannot
    be told. room: drafts that the step may have. not_asked: slots for which no guess could pay.
    missed: slots without a guess."""

    found: dict[int, IntArray]
    counts: list[int] | None
    room: int
    not_asked: list[int] = field(default_factory=list[int])
    missed: list[int] = field(default_factory=list[int])

    @property
    def are_too_many(self) -> bool:
        """True if some may not be verified for lack of room alone."""
        return self.counts is not None and sum(self.counts) >= self.room

    @property
    def taken(self) -> dict[int, IntArray]:
        """Guesses that should be verified, by slot."""
        counts = self.counts or [0] * len(self.found)
        pairs = zip(self.found.items(), counts, strict=True)
        return {slot: guess[:count] for (slot, guess), count in pairs if count}


def record_of(sequence: Sequence) -> Acceptance:
    """Return the record of a sequence's drafts, which begins with the first call."""
    sequence.acceptance = sequence.acceptance or Acceptance()
    return sequence.acceptance


class Guesses:
    """Guesses of the sequences that run, and the times of steps, by which a policy chooses among
    them. Nobody calls it while no running sequence has any."""

    def __init__(
        self, table: SequenceTable, room: DraftRoom, methods: DraftMethods, vocab_size: int
    ) -> None:
        self._table = table
        self._room = room
        self._methods = methods
        self._proposer = MethodProposer(methods, vocab_size)
        self._times = StepTimes()
        self.policy = DraftPolicy(self._times)
        self.is_timed = False  # whether steps are, which is while guesses are made
        self._num_planned = 0  # steps of sequences with guesses
        self._awaited: list[Sequence] = []  # whose drafts the next step was to wait for
        self._waits = False  # the next step, for results
        self._offered: Offers | None = None  # nothing of it was worth waiting for
        self._num_left = 0  # slots that had changed hands by then

    # --- requests -------------------------------------------------------------------------------

    def serves(self, request: EngineRequest) -> bool:
        """Return whether methods guess for a request."""
        if request.beams is not None or request.pooling is not None:
            return False
        return self._methods.serves(request)

    def ended(self, sequence: Sequence) -> None:
        """A sequence ends, and still has its tokens."""
        if not self._methods.keeps_answers or not sequence.group.is_guessed:
            return
        is_here = sequence.slot >= 0
        tokens = self._table.known_tokens(sequence.slot) if is_here else sequence.token_ids
        request = sequence.group.request
        self._methods.ended(request, tokens[len(request.prompt_token_ids) :].tolist())

    # --- before a step --------------------------------------------------------------------------

    def await_results(self) -> bool:
        """Return whether the next step should be planned when the results in flight are there.
        Drafts that follow tokens which nobody knows yet are mostly wrong, and so are those after
        drafts. Asking decides nothing: the answer to a second question is the same."""
        table = self._table
        if self._methods.are_of_model:
            return False
        self._offered = None
        if (table.num_drafted[table.live] > 0).any():
            self._waits = True
            return True
        if not self._is_anyone_asked:
            self._waits = False
            return False
        slots = (table.todo() == 1).nonzero()[0]
        tokens = np.ones(len(slots), np.int64)
        offers = self._offers(slots, tokens, self._may_guess(slots, tokens))
        self._awaited = [table.at(slot) for slot in offers.taken]
        self._waits = len(self._awaited) > 0
        if not self._waits:
            self._offered, self._num_left = offers, int(table.generation.sum())
        return self._waits

    @property
    def _is_anyone_asked(self) -> bool:
        """Return whether some running sequence is asked for guesses in the next step. Others do not
        pay for more than this question."""
        table = self._table
        return bool((table.guesses_from[table.live] <= self._num_planned).any())

    def find(self, slots: Slots, tokens: Slots) -> dict[int, IntArray]:
        """Return guesses by slot, as many as should be verified in a step in which `slots` compute
        `tokens`."""
        if not self._is_anyone_asked:
            return {}
        offers = self._offered
        if offers is None or self._num_left != self._table.generation.sum():
            is_known = self._table.num_known[slots] == self._table.num_total[slots]
            is_known |= self._methods.are_of_model
            offers = self._offers(slots, tokens, self._may_guess(slots, tokens) & is_known)
        self._settle(offers, len(slots))
        return offers.taken

    def _settle(self, offers: Offers, num_rows: int) -> None:
        """Take into account what a step of so many rows verifies, and what it does not. Sequences
        that rest are asked again in the same step as others, so that most steps ask nobody."""
        if offers.counts is not None:
            self.policy.took(offers.counts)
        awaited, self._awaited = set(self._awaited), []
        taken = offers.taken
        is_refused = offers.counts is not None and not offers.are_too_many
        refused = [slot for slot in offers.found if is_refused and slot not in taken]
        for slot in (*offers.not_asked, *refused):
            record_of(self._table.at(slot)).skipped()
            self._rest(slot, RESTS)
        period = min(1 + num_rows // ROWS_PER_MISS, MOST_MISSES)
        for slot in offers.missed:
            sequence = self._table.at(slot)
            if sequence in awaited:
                # what came instead of the expected token ended its drafts
                record_of(sequence).verified(1, 0)
            self._rest(slot, period)

    def _rest(self, slot: int, period: int) -> None:
        """Ask for guesses in a step again whose number is a multiple of `period`."""
        self._table.guesses_from[slot] = (self._num_planned // period + 1) * period

    def _offers(self, slots: Slots, tokens: Slots, may_guess: npt.NDArray[np.bool_]) -> Offers:
        """Return guesses, and how many of them the policy takes. Changes nothing that it looks
        at."""
        policy = self.policy
        room, num_tokens = self._room.of_step(slots, tokens), int(tokens.sum())
        asked: list[int] = slots[may_guess].tolist()
        if not policy.may_take(num_tokens, self._chances(asked), room):
            is_told = bool(asked) and policy.knows(num_tokens)
            return Offers({}, [] if is_told else None, room, asked if is_told else [])
        found = guesses_of(
            self._proposer, self._table, self._room, slots[may_guess], room, is_shared=False
        )
        missed = [slot for slot in asked if slot not in found]
        if not found:
            return Offers({}, None, room, missed=missed)
        counts = policy.counts(
            num_tokens, self._chances(found), [len(guess) for guess in found.values()], room
        )
        return Offers(found, counts, room, missed=missed)

    def _chances(self, slots: Iterable[int]) -> list[float]:
        """Return how likely a draft of each of these rows is right."""
        records = [self._table.at(slot).acceptance or Acceptance() for slot in slots]
        return [record.chance for record in records]

    def _may_guess(self, slots: Slots, tokens: Slots) -> npt.NDArray[np.bool_]:
        """Mark those of them whose requests have guesses, and that are not left alone for a
        while."""
        found = self._table.guesses_from[slots] <= self._num_planned
        if self._methods.follow_states:
            found &= tokens == 1
        index = found.nonzero()[0]
        found[index] = self._room.may_draft(slots[index], tokens[index])
        return found

    # --- after a step is planned ----------------------------------------------------------------

    def planned(self, now: float, tokens: Slots, drafts: ChosenDrafts, num_before: int) -> None:
        """A step is planned whose rows compute `tokens` [R] beside these drafts, with `num_before`
        steps in flight."""
        self.is_timed = True
        num_tokens = int(tokens.sum()) + len(drafts.token_ids)
        is_decode = len(tokens) > 0 and int(tokens.max()) == 1
        is_drafted = len(drafts.slots) > 0
        if not is_drafted:
            self.policy.passed()
        step = DecodeStep(num_tokens, is_drafted, is_decode)
        self._times.planned(now, step, num_before=num_before, has_waited=self._waits)
        self._num_planned += 1
        self._waits, self._offered, self._awaited = False, None, []

    def idle(self) -> None:
        """Nothing can be planned now."""
        self._offered = None
        self._times.idle()

    def applied(self, seconds: float) -> None:
        """The result of the oldest step in flight was applied, which computed for `seconds`."""
        if self.is_timed:
            self._times.applied(seconds)
            if not self._table.live.any():
                self._times.idle()

    def lost(self) -> None:
        """The steps in flight have no results, or nobody asks how long they take."""
        self._times.lost()
        self.is_timed = self._waits = False
        self._offered = None

    def verified(self, num_planned: int, num_accepted: int) -> None:
        """A step that was planned with `num_planned` drafts accepted so many of them."""
        step = self._times.oldest if self.is_timed else None
        if step is not None and step.counts:
            self.policy.verified(step.num_tokens - num_planned, num_planned, num_accepted)
