"""Position of an output in what its client predicted of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["PredictionReader"]

RUN = 3
"""Tokens that must be equal for an output to have come back to the prediction elsewhere."""


class PredictionReader:
    """Follows an output token by token. A token that differs is first taken to stand in place of
    the predicted one. If the next one differs too, the last `RUN` tokens say where the output goes
    on: at the nearest place in the prediction where they stand.

    next: index of the predicted token that should come next.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = list(token_ids)
        self._places: dict[tuple[int, ...], list[int]] = {}
        for end in range(RUN, len(self._tokens) + 1):
            self._places.setdefault(tuple(self._tokens[end - RUN : end]), []).append(end)
        self._appeared = bytearray(len(self._tokens))
        self._last: list[int] = []
        self._num_differing = 0  # of the last tokens, one after the other
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
            self._num_differing = 0
            return
        self._num_differing += 1
        if self._num_differing > 1 and (end := self._nearest(at + 1)) is not None:
            self._appeared[end - RUN : end] = b"\1" * RUN
            self.next, self._num_differing = end, 0

    def _nearest(self, at: int) -> int | None:
        """Return where the last `RUN` tokens end in the prediction, nearest to `at`."""
        if len(self._last) < RUN:
            return None
        places = self._places.get(tuple(self._last), [])
        return min(places, key=lambda end: (abs(end - at), -end), default=None)

    def upcoming(self, skip: int, most: int) -> list[int]:
        """At most `most` predicted tokens, those after the next `skip`."""
        start = self.next + skip
        return self._tokens[start : start + most]
