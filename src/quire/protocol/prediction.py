"""Where an output stands in what its client predicted of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["PredictionReader"]

RUN = 3
"""Tokens that must be equal for an output to have come back to the prediction elsewhere."""


class PredictionReader:
    """Follows an output token by token. Where the output leaves the prediction, one token is first
    taken to stand in place of another; the next `RUN` equal tokens at any later place, or else at
    the nearest earlier one, say where it goes on.

    next: index of the predicted token that should come next.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = list(token_ids)
        self._places: dict[tuple[int, ...], list[int]] = {}
        for end in range(RUN, len(self._tokens) + 1):
            self._places.setdefault(tuple(self._tokens[end - RUN : end]), []).append(end)
        self._appeared = bytearray(len(self._tokens))
        self._last: list[int] = []
        self.next = 0

    @property
    def num_accepted(self) -> int:
        """Predicted tokens that have appeared in the output."""
        return sum(self._appeared)

    @property
    def num_rejected(self) -> int:
        """Predicted tokens that have not appeared in the output."""
        return len(self._tokens) - self.num_accepted

    def read(self, token_ids: Iterable[int]) -> None:
        """The output goes on with these tokens."""
        for token in token_ids:
            self._read_one(token)

    def _read_one(self, token: int) -> None:
        self._last = [*self._last[1 - RUN :], token]
        at = self.next
        self.next = at + 1
        if at < len(self._tokens) and self._tokens[at] == token:
            self._appeared[at] = 1
            return
        end = self._return_to(at)
        if end is not None:
            self._appeared[end - RUN : end] = b"\1" * RUN
            self.next = end

    def _return_to(self, at: int) -> int | None:
        """Where the last `RUN` tokens end in the prediction: the first place after `at`, or else
        the last one before it."""
        if len(self._last) < RUN:
            return None
        places = self._places.get(tuple(self._last), [])
        later = next((end for end in places if end > at), None)
        return later if later is not None else (places[-1] if places else None)

    def upcoming(self, skip: int, most: int) -> list[int]:
        """At most `most` predicted tokens, those after the next `skip`."""
        start = self.next + skip
        return self._tokens[start : start + most]
