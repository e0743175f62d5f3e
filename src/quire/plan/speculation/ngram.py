"""Prompt look-up: repeats the tokens that followed the last n-gram where it occurred before."""

from __future__ import annotations

from quire.plan.speculation.history import TokenHistory
from quire.protocol.step import IntArray

__all__ = ["NgramDrafter"]

LONGEST_RUN = 4
"""Tokens per indexed run; longer n-grams are compared token by token."""


class NgramDrafter:
    """Finds the longest n-gram of `shortest` to `longest` tokens that both ends the sequence and
    occurs earlier, and guesses the tokens that followed it. A guess that reaches the end of the
    sequence continues with its own tokens, so loops of any length are guessed."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._history = TokenHistory(min(shortest, LONGEST_RUN))
        self._shortest = shortest
        self._longest = longest

    def propose(self, token_ids: IntArray, num_in_flight: int, max_drafts: int) -> list[int]:
        history = self._history
        history.extend(token_ids[len(history.tokens) :].tolist())
        found = [
            (length, place)
            for place, length in history.matches(history.tokens, self._longest)
            if length >= self._shortest
        ]
        if not found:
            return []
        _, place = max(found)
        tokens, guess = history.tokens, list[int]()
        for index in range(place, place + num_in_flight + max_drafts):
            ahead = index - len(tokens)
            guess.append(tokens[index] if ahead < 0 else guess[ahead])
        return guess[num_in_flight:]
