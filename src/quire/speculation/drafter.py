"""Drafters: each guesses the next tokens of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.protocol.prediction import PredictionReader
from quire.protocol.step import DRAFT_OF_MODEL, IntArray

__all__ = ["BestOf", "Drafter", "DraftsOfModel", "NoDrafter", "PredictionDrafter"]

_FADES = 0.8
"""Share that what a drafter got right before keeps with each new guess."""


class Drafter(Protocol):
    """Is asked about one sequence, which grows from call to call. A wrong guess costs time, never a
    wrong token."""

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        """Guess at most `max_drafts` tokens; none to decode as usual.

        token_ids: int32 [N], prompt and output as far as they are known. num_in_flight: how many
            tokens come before the guessed ones that are not known yet.
        """
        ...


class NoDrafter:
    """Guesses nothing."""

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        """Return nothing."""
        del token_ids, num_in_flight, max_drafts
        return []


class DraftsOfModel:
    """Leaves the guess to a model on the data side."""

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        """Return a place for each draft that there may be."""
        del token_ids, num_in_flight
        return [DRAFT_OF_MODEL] * max_drafts


class PredictionDrafter:
    """Guesses what the client has predicted, and beyond it or away from it what another drafter
    guesses."""

    def __init__(self, predicted: Sequence[int], num_prompt: int, other: Drafter) -> None:
        self._reader = PredictionReader(predicted)
        self._num_read = num_prompt
        self._other = other

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        self._reader.read(token_ids[self._num_read :].tolist())
        self._num_read = max(self._num_read, len(token_ids))
        drafts = self._reader.upcoming(num_in_flight, max_drafts)
        return drafts or self._other.propose(token_ids, num_in_flight, max_drafts)


class BestOf:
    """Guesses what that one of several drafters does which was right more often of late; the first
    of equals that guesses at all."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self._scores = [0.0] * len(drafters)
        self._guesses: list[list[int]] = [[] for _ in drafters]
        self._guessed_at = 0

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        if num_in_flight == 0:
            self._judge(token_ids)
        guesses = [each.propose(token_ids, num_in_flight, max_drafts) for each in self._drafters]
        if num_in_flight == 0:
            self._guesses, self._guessed_at = guesses, len(token_ids)
        order = sorted(range(len(guesses)), key=lambda i: -self._scores[i])
        return next((guesses[i] for i in order if guesses[i]), [])

    def _judge(self, token_ids: IntArray) -> None:
        """Score each drafter by how far its last guess agrees with what has come since."""
        came = token_ids[self._guessed_at :].tolist()
        for i, guess in enumerate(self._guesses):
            if came and guess:
                self._scores[i] = _FADES * self._scores[i] + _num_equal(guess, came)


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of tokens before the first that differs."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))
