"""Verification of drafts: a row keeps them while they equal its draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.compute.runner.rows import RowTable, Slots
from quire.protocol.step import IntArray, RowTokens

__all__ = ["counts_of", "draw_in_turns", "keep_in_turns"]


def draw_in_turns(
    rows: RowTable, slots: Slots, draw: Callable[[Slots, int], IntArray]
) -> RowTokens:
    """Draw the next token of each row of `slots` [N], then the one after it where the draw equals
    the row's draft, and so on. Rows take the tokens as they are drawn, so each draw sees a row as
    if it had been decoded up to there; then they forget what they computed of other drafts.

    draw: (indices into `slots` [M], turn) → their token ids int32 [M], negative in a row that
        fails, which gives no tokens.
    """
    num_drafts = rows.num_drafts[slots]
    drawn = np.zeros((len(slots), int(num_drafts.max(initial=0)) + 1), np.int32)
    counts = np.zeros(len(slots), np.int64)
    lives = np.ones(len(slots), np.bool_)
    index, turn = np.arange(len(slots)), 0
    while len(index):
        token_ids = draw(index, turn)
        has_token = token_ids >= 0
        lives[index[~has_token]] = False
        index, token_ids = index[has_token], token_ids[has_token]
        is_accepted = (num_drafts[index] > turn) & rows.accepts(slots[index], token_ids)
        rows.append(slots[index], token_ids)
        drawn[index, turn] = token_ids
        counts[index] += 1
        index, turn = index[is_accepted], turn + 1
    rows.rewind(slots[lives], (num_drafts + 1 - counts)[lives])
    counts[~lives] = 0
    token_ids = drawn[np.arange(drawn.shape[1]) < counts[:, None]]
    return RowTokens(slots[lives], counts[lives], token_ids)


def keep_in_turns(
    rows: RowTable, slots: Slots, see: Callable[[Slots, int], npt.NDArray[np.bool_]]
) -> RowTokens:
    """Look at each row of `slots` [N] as it is, then with its first draft, and so on to its last
    one, for rows that draw nothing. The drafts that rows have taken: they keep them.

    see: (indices into `slots` [M], turn) → bool [M], whether the row can go on: one that cannot
        gives back the draft before this turn.
    """
    num_drafts = rows.num_drafts[slots]
    kept = np.zeros(len(slots), np.int64)
    index, turn = np.arange(len(slots)), 0
    while len(index):
        is_sound = see(index, turn)
        if turn:
            rows.num_tokens[slots[index[~is_sound]]] -= 1
            kept[index[is_sound]] = turn
        index, turn = index[is_sound & (num_drafts[index] > turn)], turn + 1
        rows.keep_draft(slots[index])
    rows.rewind(slots, num_drafts - kept)
    firsts = rows.num_tokens[slots] - kept
    places = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
    of_token = np.repeat(slots, kept)
    return RowTokens(slots, kept, rows.token_ids[of_token, np.repeat(firsts, kept) + places])


def counts_of(drawn: RowTokens) -> IntArray | None:
    """`StepResult.counts`: None where every row has one token."""
    return None if len(drawn.token_ids) == len(drawn.slots) else drawn.counts.astype(np.int32)
