"""Per-sequence scalars as columns indexed by slot, so that a steady step is a few array passes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.plan.scheduler.sequence import Sequence
from quire.protocol.request import EngineRequest
from quire.protocol.step import IntArray

__all__ = ["NUM_STOP_COLUMNS", "SequenceTable"]

Slots = npt.NDArray[np.int64]

NUM_STOP_COLUMNS = 4
"""Stop token ids compared array-wise; any token of a sequence with more `looks_back`."""


NEVER = np.iinfo(np.int64).max
"""Later than any step."""


class SequenceTable:
    """The running sequences.

    num_total: tokens, those still in flight counted. num_known: tokens whose values have arrived.
    num_computed: tokens whose K/V are in the cache once all planned steps have run. With drafts in
    flight both are upper bounds, too large by num_drafted at most. The values of the tokens are
    `token_ids[slot, :num_known]`. standing: tokens per step that the data side was told. account:
    account of the group. draws: 1 where the data side draws the next token, 0 where the plan side
    chooses it or none follows. num_held_back: known tokens that must not be computed yet: the last
    one while the prompt is open, since the row would then draw; all while a rewind is due.
    is_watched: whether verdicts decide what the client gets. is_paused: whether the slot computes
    nothing before the next verdict. is_masked: whether a grammar says what is drawn. looks_back:
    whether any token may end the sequence. whole_end: see `SequenceGroup`. guesses_from: number of
    the first step that drafts are asked for (`Drafts`). generation: rises when a slot changes
    hands, so that late results find no stranger. num_steps: steps of the sequence behind its
    prompt. fewest_rows, most_rows: other rows in these, while it has this slot.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.num_total = np.zeros(max_num_seqs, np.int64)
        self.num_known = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_drafted = np.zeros(max_num_seqs, np.int64)
        self.max_total = np.zeros(max_num_seqs, np.int64)
        self.handle = np.zeros(max_num_seqs, np.int64)
        self.account = np.zeros(max_num_seqs, np.int64)
        self.standing = np.zeros(max_num_seqs, np.int64)
        self.draws = np.ones(max_num_seqs, np.int64)
        self.num_held_back = np.zeros(max_num_seqs, np.int64)
        self.is_watched = np.zeros(max_num_seqs, np.bool_)
        self.is_paused = np.zeros(max_num_seqs, np.bool_)
        self.is_masked = np.zeros(max_num_seqs, np.bool_)
        self.guesses_from = np.full(max_num_seqs, NEVER, np.int64)
        self.generation = np.zeros(max_num_seqs, np.int64)
        self.num_steps = np.zeros(max_num_seqs, np.int64)
        self.fewest_rows = np.zeros(max_num_seqs, np.int64)
        self.most_rows = np.zeros(max_num_seqs, np.int64)
        self.whole_end = np.zeros(max_num_seqs, np.int64)
        self.live = np.zeros(max_num_seqs, np.bool_)
        self.stop_ids = np.full((max_num_seqs, NUM_STOP_COLUMNS), -1, np.int64)
        self.looks_back = np.zeros(max_num_seqs, np.bool_)
        # Steps that are not in the columns yet, all of the same slots.
        self._counted = np.zeros(0, np.int64)
        self._counted_names = b""
        self._num_counted: int = 0
        self._counted_others: int = 0
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._has_drafted = False  # ever: a plain step is not to pay for drafts
        self.has_watched = False  # likewise
        # Slots of such groups.
        self.num_masked = self.num_guessed = self.num_spare = self.num_looking_back = 0
        self.num_with_whole = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence, num_computed: int) -> int:
        """Give a sequence a slot and move its tokens into the columns."""
        slot = self._free.pop()
        group = sequence.group
        tokens = sequence.token_ids
        self.sequences[slot] = sequence
        self.token_ids[slot, : len(tokens)] = tokens
        self.num_prompt[slot] = len(group.request.prompt_token_ids)
        self.num_total[slot] = self.num_known[slot] = len(tokens)
        self.num_computed[slot] = num_computed
        self.num_drafted[slot] = 0
        self.max_total[slot] = group.max_total_tokens
        self.handle[slot] = sequence.handle
        self.account[slot] = group.account
        self.standing[slot] = 0
        self.num_steps[slot] = group.record.num_steps
        self.fewest_rows[slot], self.most_rows[slot] = NEVER, 0
        self.draws[slot] = group.draws
        self.num_held_back[slot] = group.request.is_open
        self.is_watched[slot] = group.is_watched
        self.is_masked[slot] = group.grammar is not None
        self.is_paused[slot] = sequence.unsent is not None and sequence.unsent.must_wait
        self.has_watched |= group.is_watched
        self.num_masked += int(self.is_masked[slot])
        self.num_guessed += group.is_guessed
        self.num_spare += group.is_spare
        self.guesses_from[slot] = 0 if group.is_guessed else NEVER
        self.whole_end[slot] = group.whole_end
        self.num_with_whole += group.whole_end > 0
        self.live[slot] = True
        self._set_stops(slot, group.request)
        sequence.slot = slot
        return slot

    def extend(self, slot: int, token_ids: IntArray) -> None:
        """The prompt of a slot grows; nothing has been generated yet."""
        start, count = int(self.num_known[slot]), len(token_ids)
        self.token_ids[slot, start : start + count] = token_ids
        for column in (self.num_known, self.num_total, self.num_prompt):
            column[slot] += count

    def close(self, slot: int, max_total: int) -> None:
        """The prompt of a slot is complete."""
        self.num_held_back[slot] = 0
        self.max_total[slot] = max_total

    def suspend(self, slots: list[int]) -> None:
        """Take these slots without computing, until `resume`: their K/V are being copied."""
        self.live[slots] = False

    def resume(self, slot: int, num_computed: int) -> None:
        """A suspended slot has the K/V of its first `num_computed` tokens."""
        self.live[slot] = True
        self.num_computed[slot] = num_computed

    def count_steps(self, slots: Slots, num_others: int) -> None:
        """Count a step of `slots` [R] behind their prompts, beside `num_others` rows each. Steps of
        the same slots are written to the columns together."""
        names = slots.tobytes()
        if names != self._counted_names or num_others != self._counted_others:
            self._write_steps()
            self._counted_names, self._counted, self._counted_others = names, slots, num_others
        self._num_counted += 1

    def _write_steps(self) -> None:
        if self._num_counted:
            slots, num_others = self._counted, self._counted_others
            self.num_steps[slots] += self._num_counted
            self.fewest_rows[slots] = np.minimum(self.fewest_rows[slots], num_others)
            self.most_rows[slots] = np.maximum(self.most_rows[slots], num_others)
            self._num_counted = 0

    def copy_steps(self, src: int, dst: int) -> None:
        """Let a branch have made the steps of its source."""
        self._write_steps()
        self.num_steps[dst] = self.num_steps[src]

    def steps_of(self, slot: int) -> tuple[int, tuple[int, int]]:
        """Return the steps of a slot behind its prompt, and the fewest and most other rows; none
        if it has made no step since it came to the slot."""
        self._write_steps()
        if self.fewest_rows[slot] == NEVER:
            return 0, (0, 0)
        rows = int(self.fewest_rows[slot]), int(self.most_rows[slot])
        return int(self.num_steps[slot]), rows

    def todo(self) -> Slots:
        """Tokens that each slot has left to compute before its next one can be drawn: [slots]."""
        left = self.num_total - self.num_held_back - self.num_computed
        if self.has_watched:
            left = np.where(self.is_paused, 0, left)
        return np.where(self.live & (self.num_total < self.max_total), left, 0)

    def first_query(self, slots: Slots) -> Slots:
        """Lower bounds of the positions that these slots [R] compute next."""
        starts = self.num_computed[slots]
        if self._has_drafted:
            starts = starts - self.num_drafted[slots]
        return starts

    def draft(self, slots: Slots, counts: Slots) -> None:
        """Count a step that verifies `counts` [R] drafts of `slots` [R]; it may accept all of
        them."""
        self._has_drafted = True
        for column in (self.num_computed, self.num_total, self.num_drafted):
            column[slots] += counts

    def rewind(self, slots: Slots, drafted: Slots, rejected: Slots) -> None:
        """Take back `rejected` [R] of the `drafted` [R] tokens of `slots` [R]."""
        self.num_drafted[slots] -= drafted
        self.num_total[slots] -= rejected
        self.num_computed[slots] -= rejected

    def stop(self, slot: int, num_known: int) -> None:
        """Keep only the first `num_known` tokens, with none in flight. The slot computes nothing
        until `go_on`."""
        self.num_known[slot] = num_known
        self.num_drafted[slot] = 0
        self.num_computed[slot] = min(int(self.num_computed[slot]), num_known - 1)
        self.num_total[slot] = num_known
        self.num_held_back[slot] = self.num_total[slot] - self.num_computed[slot]

    def go_on(self, slot: int, num_computed: int) -> None:
        """Resume a stopped slot: it has the K/V of its first `num_computed` tokens and computes the
        others."""
        self.num_held_back[slot] = 0
        self.num_computed[slot] = num_computed

    def _set_stops(self, slot: int, request: EngineRequest) -> None:
        ordered = sorted(request.stop_token_ids)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ordered)] = ordered[:NUM_STOP_COLUMNS]
        has_more = len(ordered) > NUM_STOP_COLUMNS
        self.looks_back[slot] = has_more or request.looks_back
        self.num_looking_back += int(self.looks_back[slot])

    def leave(self, sequence: Sequence) -> int:
        """Take the slot back; the sequence keeps its known tokens."""
        slot = sequence.slot
        sequence.group.record.count_steps(*self.steps_of(slot))
        self.num_masked -= int(self.is_masked[slot])
        self.num_guessed -= sequence.group.is_guessed
        self.num_spare -= sequence.group.is_spare
        self.num_with_whole -= int(self.whole_end[slot] > 0)
        self.whole_end[slot] = 0
        sequence.token_ids = self.known_tokens(slot).copy()
        sequence.slot = -1
        self.sequences[slot] = None
        self.live[slot] = False
        self.num_held_back[slot] = 0
        self.is_watched[slot] = self.is_paused[slot] = False
        self.generation[slot] += 1
        self.standing[slot] = 0
        self.num_looking_back -= int(self.looks_back[slot])
        self.looks_back[slot] = False
        self._free.append(slot)
        return slot

    def append(self, slots: Slots, tokens: IntArray) -> None:
        """The plan side has chosen the next tokens [N] of `slots` [N]."""
        self.token_ids[slots, self.num_known[slots]] = tokens
        self.num_known[slots] += 1
        self.num_total[slots] += 1

    def known_tokens(self, slot: int) -> IntArray:
        """View of the tokens of a slot whose values have arrived."""
        return self.token_ids[slot, : self.num_known[slot]]

    def at(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        if sequence is None:
            raise LookupError(f"slot {slot} is empty")
        return sequence

    def may_end(self, slots: Slots, tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Return which of the tokens [N], just appended to `slots`, may end their sequences: all
        that do, and few others. `EngineRequest.ending` decides."""
        num_known = self.num_known[slots]
        hit = (tokens[:, None] == self.stop_ids[slots]).any(axis=1) | (
            num_known >= self.max_total[slots]
        )
        if self.num_looking_back:
            hit |= self.looks_back[slots]
        return hit
