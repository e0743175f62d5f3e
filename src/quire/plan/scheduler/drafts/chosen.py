"""The drafts that a step verifies, and counts of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.protocol.step import IntArray, no_ints

__all__ = ["NO_DRAFTS", "ChosenDrafts", "DraftTotals", "Slots"]

Slots = npt.NDArray[np.int64]


def _no_slots() -> Slots:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class ChosenDrafts:
    """slots [R] with `counts` [R] drafts each, at least one; token_ids: int32 [sum of counts].
    are_forced: a grammar chose them, so that all are right; else they are guesses."""

    slots: Slots = field(default_factory=_no_slots)
    counts: Slots = field(default_factory=_no_slots)
    token_ids: IntArray = field(default_factory=no_ints)
    are_forced: bool = False

    @classmethod
    def of(cls, found: dict[int, IntArray], *, are_forced: bool) -> ChosenDrafts:
        """Return the drafts of at least one slot."""
        return cls(
            np.fromiter(found, np.int64, len(found)),
            np.array([len(guess) for guess in found.values()], np.int64),
            np.concatenate(list(found.values())).astype(np.int32),
            are_forced,
        )


NO_DRAFTS = ChosenDrafts()


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
