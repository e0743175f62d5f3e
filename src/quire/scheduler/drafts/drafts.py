"""Drafts: guesses at the next tokens of sequences, verified beside a step's certain work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.config.memory.plan import FEWEST_DRAFTS
from quire.kv_cache import KVManager
from quire.platform.interrupts import is_ctrl_c
from quire.protocol.request import EngineRequest
from quire.protocol.step import DRAFT_OF_MODEL, IntArray, no_ints
from quire.scheduler.sequence import Sequence
from quire.scheduler.table import SequenceTable
from quire.speculation import Acceptance, DraftMethods, DraftPolicy
from quire.speculation.policy import RESTS
from quire.speculation.step_times import DecodeStep, StepTimes

__all__ = ["NO_DRAFTS", "ChosenDrafts", "DraftProposer", "DraftTotals", "Drafts"]

Slots = npt.NDArray[np.int64]


def _no_slots() -> Slots:
    return np.zeros(0, np.int64)


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


@dataclass(frozen=True, slots=True)
class ChosenDrafts:
    """slots [R] with `counts` [R] drafts each, at least one; token_ids: int32 [sum of counts].
    are_forced: a grammar chose them, so that all are right; else they are guesses."""

    slots: Slots = field(default_factory=_no_slots)
    counts: Slots = field(default_factory=_no_slots)
    token_ids: IntArray = field(default_factory=no_ints)
    are_forced: bool = False


MAX_FORCED = 32
"""A row computes so many tokens without alternative in a step: each has logits of its own."""

MOST_FORCED_RESTS = 4
"""Steps for which a grammar that leaves alternatives is not asked again, at most: asking takes
time, and so few are little of a long run of tokens without any."""

NO_DRAFTS = ChosenDrafts()

MOST_MISSES, ROWS_PER_MISS = 4, 4
"""Period in which a sequence is asked again of which nothing could be guessed: one step more for so
many that compute, since asking each of them takes time beside the step."""


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
        for i, token in enumerate(drafts):
            if token == DRAFT_OF_MODEL:
                continue
            if not 0 <= token < self._vocab_size:
                return np.array(drafts[:i], np.int32)
            if token in request.stop_token_ids:
                return np.array(drafts[: i + 1], np.int32)
        return np.array(drafts, np.int32)


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


@dataclass(slots=True)
class DraftTotals:
    """Counts since the engine started. rows: rows with drafts in a step. drafts: drafts of these
    rows. accepted: drafts that were accepted. accepted_at: accepted drafts by place
    in their row."""

    rows: int = 0
    drafts: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list[int])

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """A row had so many drafts, and the first so many were right."""
        self.rows += 1
        self.drafts += num_drafts
        self.accepted += num_accepted
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
        for place in range(num_accepted):
            self.accepted_at[place] += 1


class Drafts:
    """Tokens to which a grammar leaves no alternative, and guesses. Both are verified; the former
    are never rejected, so they cost one step together.

    Drafts take what is left of a step's tokens and of the blocks, so that no certain work waits for
    a guess. A row with a recurrent state has drafts only beside a single certain token: the inputs
    of the tokens that may be taken back are kept, and those of a chunk would take too much memory.

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
        self._kv = kv
        self._max_tokens = max_num_batched_tokens
        self._times = StepTimes()
        self._is_timed = False  # whether steps are, which is while guesses are made
        self._methods: DraftMethods | None = None
        self._policy: DraftPolicy | None = None
        self._proposer = proposer
        self._guesser: DraftProposer | None = None
        if methods is not None:
            self._guesser = MethodProposer(methods, vocab_size)
            self._methods, self._policy = methods, DraftPolicy(self._times)
        self._are_of_model = self._methods is not None and self._methods.are_of_model
        self._follow_states = self._methods is not None and self._methods.follow_states
        self._has_recurrence = kv.states is not None
        self._num_planned = 0  # steps of sequences with guesses
        self._awaited: list[Sequence] = []  # whose drafts the next step was to wait for
        self._waits = False  # the next step, for results
        self._offered: Offers | None = None  # nothing of it was worth waiting for
        self._num_left = 0  # slots that had changed hands by then
        self.totals = DraftTotals()
        self.takes_forced = True

    # --- requests -------------------------------------------------------------------------------

    def serves(self, request: EngineRequest) -> bool:
        """Return whether methods guess for a request."""
        if self._methods is None or request.beams is not None or request.pooling is not None:
            return False
        return self._methods.serves(request)

    def ended(self, sequence: Sequence) -> None:
        """A sequence ends, and still has its tokens."""
        methods = self._methods
        if methods is None or not methods.keeps_answers or not sequence.group.is_guessed:
            return
        is_here = sequence.slot >= 0
        tokens = self._table.known_tokens(sequence.slot) if is_here else sequence.token_ids
        request = sequence.group.request
        methods.ended(request, tokens[len(request.prompt_token_ids) :].tolist())

    # --- steps ----------------------------------------------------------------------------------

    @property
    def _by_policy(self) -> DraftPolicy | None:
        """The policy, where some running sequence has guesses by methods. Other steps do not pay
        for them."""
        is_off = not self._table.num_guessed or self._proposer is not None
        return None if is_off else self._policy

    def await_results(self) -> bool:
        """Return whether the next step should be planned when the results in flight are there.
        Drafts that follow tokens which nobody knows yet are mostly wrong, and so are those after
        drafts. Asking decides nothing: the answer to a second question is the same."""
        policy, table = self._by_policy, self._table
        if policy is None or self._are_of_model:
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
        offers = self._offers(policy, slots, tokens, self._may_guess(slots, tokens))
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

    def choose(self, slots: Slots, tokens: Slots) -> ChosenDrafts:
        """Drafts of the rows that sample in a step in which `slots` compute `tokens`, with blocks
        for all of them."""
        if not len(slots):
            return NO_DRAFTS
        found = self._forced_of(slots, tokens) if self._table.num_masked else {}
        are_forced = bool(found)
        if not found and self._proposer is not None:
            may_guess = self._may_draft(slots, tokens)
            found = self._guesses(self._proposer, slots, tokens, may_guess)
        elif not found and (policy := self._by_policy) is not None:
            found = self._guesses_of(policy, slots, tokens)
        if not found:
            return NO_DRAFTS
        chosen = ChosenDrafts(
            np.fromiter(found, np.int64, len(found)),
            np.array([len(guess) for guess in found.values()], np.int64),
            np.concatenate(list(found.values())).astype(np.int32),
            are_forced,
        )
        return chosen if self._give_blocks(chosen, slots, tokens) else NO_DRAFTS

    def _guesses_of(self, policy: DraftPolicy, slots: Slots, tokens: Slots) -> dict[int, IntArray]:
        """Guesses by slot, as many as should be verified."""
        if not self._is_anyone_asked:
            return {}
        offers = self._offered
        if offers is None or self._num_left != self._table.generation.sum():
            is_known = self._table.num_known[slots] == self._table.num_total[slots]
            is_known |= self._are_of_model
            offers = self._offers(policy, slots, tokens, self._may_guess(slots, tokens) & is_known)
        self._settle(policy, offers, len(slots))
        return offers.taken

    def _settle(self, policy: DraftPolicy, offers: Offers, num_rows: int) -> None:
        """Take into account what a step of so many rows verifies, and what it does not. Sequences
        that rest are asked again in the same step as others, so that most steps ask nobody."""
        if offers.counts is not None:
            policy.took(offers.counts)
        awaited, self._awaited = set(self._awaited), []
        taken = offers.taken
        is_refused = offers.counts is not None and not offers.are_too_many
        refused = [slot for slot in offers.found if is_refused and slot not in taken]
        for slot in (*offers.not_asked, *refused):
            self._record(slot).skipped()
            self._rest(slot, RESTS)
        period = min(1 + num_rows // ROWS_PER_MISS, MOST_MISSES)
        for slot in offers.missed:
            if self._table.at(slot) in awaited:
                # what came instead of the expected token ended its drafts
                self._record(slot).verified(1, 0)
            self._rest(slot, period)

    def _rest(self, slot: int, period: int) -> None:
        """Ask for guesses in a step again whose number is a multiple of `period`."""
        self._table.guesses_from[slot] = (self._num_planned // period + 1) * period

    def _record(self, slot: int) -> Acceptance:
        sequence = self._table.at(slot)
        sequence.acceptance = sequence.acceptance or Acceptance()
        return sequence.acceptance

    def _forced_of(self, slots: Slots, tokens: Slots) -> dict[int, IntArray]:
        """Return tokens without alternative, by slot. Rows without a grammar pay nothing."""
        is_masked = self._table.is_masked[slots]
        if not self.takes_forced:
            return {}
        left = self._room(slots, tokens)
        slots, tokens = slots[is_masked], tokens[is_masked]
        found: dict[int, IntArray] = {}
        for slot in slots[self._may_draft(slots, tokens)].tolist():
            forced = self._forced(slot, left)
            if len(forced):
                found[slot] = forced
                left -= len(forced)
        return found

    def _forced(self, slot: int, left: int) -> IntArray:
        """Return the tokens to which a sequence's grammar leaves no alternative, after those in
        flight."""
        table, sequence = self._table, self._table.at(slot)
        group, known = sequence.group, table.known_tokens(slot)
        # The step draws one token more than it accepts drafts.
        most = min(int(table.max_total[slot] - table.num_total[slot]) - 1, left, MAX_FORCED)
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

    def planned(self, now: float, tokens: Slots, drafts: ChosenDrafts, num_before: int) -> None:
        """A step is planned whose rows compute `tokens` [R] beside these drafts, with `num_before`
        steps in flight."""
        policy = self._by_policy
        if policy is None:
            if self._is_timed:
                self.lost()
            return
        self._is_timed = True
        num_tokens = int(tokens.sum()) + len(drafts.token_ids)
        is_decode = len(tokens) > 0 and int(tokens.max()) == 1
        is_drafted = len(drafts.slots) > 0
        if not is_drafted:
            policy.passed()
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
        if self._is_timed:
            self._times.applied(seconds)
            if not self._table.live.any():
                self._times.idle()

    def lost(self) -> None:
        """The steps in flight have no results, or nobody asks how long they take."""
        self._times.lost()
        self._is_timed = self._waits = False
        self._offered = None

    def verified(self, slots: Slots, num_planned: int, made: Slots, accepted: Slots) -> None:
        """Count that `accepted` [R] of the `made` [R] drafts of `slots` [R] were right, in a step
        that was planned with `num_planned`, those of rows that are gone meanwhile included."""
        has_any = made > 0
        rows = zip(*(each[has_any].tolist() for each in (slots, made, accepted)), strict=True)
        for slot, num_drafts, num_accepted in rows:
            self.totals.count(num_drafts, num_accepted)
            self._record(slot).verified(num_drafts, num_accepted)
        step = self._times.oldest if self._is_timed else None
        if self._policy is not None and step is not None and step.counts:
            num_tokens = step.num_tokens - num_planned
            self._policy.verified(num_tokens, num_planned, int(accepted.sum()))

    # --- what a step verifies -------------------------------------------------------------------

    def _offers(
        self,
        policy: DraftPolicy,
        slots: Slots,
        tokens: Slots,
        may_guess: npt.NDArray[np.bool_],
    ) -> Offers:
        """Return guesses, and how many of them the policy takes. Changes nothing that it looks
        at."""
        assert self._guesser is not None
        room, num_tokens = self._room(slots, tokens), int(tokens.sum())
        asked: list[int] = slots[may_guess].tolist()
        if not policy.may_take(num_tokens, self._chances(asked), room):
            is_told = bool(asked) and policy.knows(num_tokens)
            return Offers({}, [] if is_told else None, room, asked if is_told else [])
        found = self._guesses(self._guesser, slots, tokens, may_guess)
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

    def _room(self, slots: Slots, tokens: Slots) -> int:
        """Drafts that a step may have in all."""
        most = max(len(self._table.live) - len(slots), FEWEST_DRAFTS)
        return min(self._max_tokens - int(tokens.sum()), most)

    def _guesses(
        self,
        proposer: DraftProposer,
        slots: Slots,
        tokens: Slots,
        may_guess: npt.NDArray[np.bool_],
    ) -> dict[int, IntArray]:
        """Guesses by slot, of those that may have some. Without a policy they share what room there
        is."""
        left = self._room(slots, tokens)
        found: dict[int, IntArray] = {}
        for slot in slots[may_guess].tolist():
            guess = self._propose(proposer, slot, left)
            if len(guess):
                found[slot] = guess
                left -= len(guess) if proposer is self._proposer else 0
        return found

    def _may_draft(self, slots: Slots, tokens: Slots) -> npt.NDArray[np.bool_]:
        """Mark the rows that reach their last token, draw the next, and have no others branch
        off."""
        table = self._table
        reaches = table.num_computed[slots] + tokens == table.num_total[slots]
        may_draft = reaches & (table.draws[slots] == 1)
        if self._has_recurrence:
            may_draft &= tokens == 1
        for i in may_draft.nonzero()[0].tolist():
            may_draft[i] = not table.at(int(slots[i])).group.may_branch
        return may_draft

    def _may_guess(self, slots: Slots, tokens: Slots) -> npt.NDArray[np.bool_]:
        """Mark those of them whose requests have guesses, and that are not left alone for a
        while."""
        found = self._table.guesses_from[slots] <= self._num_planned
        if self._follow_states:
            found &= tokens == 1
        index = found.nonzero()[0]
        found[index] = self._may_draft(slots[index], tokens[index])
        return found

    def _propose(self, proposer: DraftProposer, slot: int, left: int) -> IntArray:
        table = self._table
        known = table.known_tokens(slot)
        # The step draws one token more than it accepts drafts.
        room = int(table.max_total[slot] - table.num_total[slot]) - 1
        most = min(room, left)
        if most <= 0:
            return known[:0]
        unknown = int(table.num_total[slot]) - len(known)
        return proposer.propose(table.at(slot), known, unknown, most)[:most]

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
