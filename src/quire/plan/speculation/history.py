"""An index of the places at which runs of tokens occur."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["TokenHistory"]

MOST_PLACES = 32
"""Places kept per run; the latest ones stay. More would hardly improve a guess."""


class TokenHistory:
    """An append-only list of tokens with an index of all runs of `run` tokens. Adding a token takes
    constant time."""

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
        """Find earlier places that end with the same tokens as `context`.

        Returns pairs of place and number of equal tokens, between `run` and `longest`; latest
        places first.
        """
        places = self._places.get(tuple(context[-self._run :]), [])[-MOST_PLACES:]
        return [(place, self._num_equal(context, place, longest)) for place in reversed(places)]

    def _num_equal(self, context: Sequence[int], place: int, longest: int) -> int:
        tokens, last = self.tokens, len(context)
        most = min(longest, place, last)
        count = min(self._run, most)
        while count < most and tokens[place - 1 - count] == context[last - 1 - count]:
            count += 1
        return count
