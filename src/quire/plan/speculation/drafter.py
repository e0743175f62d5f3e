"""Drafters: each guesses the next tokens of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.protocol.prediction import PredictionReader
from quire.protocol.step import DRAFT_OF_MODEL, IntArray

__all__ = ["BestOf", "Drafter", "DraftsOfModel", "NoDrafter", "PredictionDrafter"]

_FADES = 0.8
"""Decay of a drafter's score with each new guess."""


class Drafter(Protocol):
    """Guesses the next tokens of one sequence, which grows between calls. A wrong guess costs time
    and never changes a token."""

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        """Guess at most `max_drafts` tokens, or none to decode as usual.

        token_ids: int32 [N], the known tokens of prompt and output. num_in_flight: number of tokens
        between these and the guess that are still being computed.
        """
        ...


class NoDrafter:
    """Guesses nothing."""

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        """Return nothing."""
        del token_ids, num_in_flight, max_drafts
        return []


class DraftsOfModel:
    """Reserves places for the drafts of a model on the data side."""

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        """Return one placeholder per possible draft."""
        del token_ids, num_in_flight
        return [DRAFT_OF_MODEL] * max_drafts


class PredictionDrafter:
    """Guesses the client's prediction. Past its end, or where the output departs from it, another
    drafter guesses."""

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
    """Asks several drafters and returns the guess of the one with the best recent score. The first
    wins a tie; drafters without a guess are skipped."""

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
        """Score each drafter by how many tokens of its last guess were right."""
        came = token_ids[self._guessed_at :].tolist()
        for i, guess in enumerate(self._guesses):
            if came and guess:
                self._scores[i] = _FADES * self._scores[i] + _num_equal(guess, came)


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))
