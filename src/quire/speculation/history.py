"""Tokens, and where runs of them stand."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TokenHistory"]

MOST_PLACES = 32
"""Of one run, the last ones. A run that has more says little about what follows."""


class TokenHistory:
    """Tokens that only grow, with an index of all runs of `run` tokens: a token costs the same
    however many were before it."""

    def __init__(self, run: int) -> None:
        self.tokens: list[int] = []
        self._run = run
        self._places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens. A negative one stands for a gap."""
        tokens, run, places = self.tokens, self._run, self._places
        for token in token_ids:
            end = len(tokens)
            if end >= run:
                known = places.setdefault(tuple(tokens[end - run : end]), [])
                known.append(end)
                if len(known) > 2 * MOST_PLACES:
                    del known[:-MOST_PLACES]
            tokens.append(token)

    def matches(self, context: Sequence[int], longest: int) -> list[tuple[int, int]]:
        """Places before which the history ends as `context` does, each with how many tokens are
        equal there, at most `longest`; latest places first. Equal are at least `run` tokens."""
        places = self._places.get(tuple(context[-self._run :]), [])[-MOST_PLACES:]
        return [(place, self._num_equal(context, place, longest)) for place in reversed(places)]

    def _num_equal(self, context: Sequence[int], place: int, longest: int) -> int:
        tokens, last = self.tokens, len(context)
        most = min(longest, place, last)
        count = min(self._run, most)
        while count < most and tokens[place - 1 - count] == context[last - 1 - count]:
            count += 1
        return count
