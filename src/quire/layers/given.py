"""Embeddings that a request brings itself, in place of rows of the token table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from quire.attention.step_inputs import GivenRows

__all__ = ["GivenEmbeddings"]


class GivenEmbeddings:
    """Embeddings that replace rows of the token table in the running forward. It is built with the
    model, so model files pass nothing on.

    width: elements of a row; 0 before the table is made.
    """

    def __init__(self) -> None:
        self.width = 0
        self._now: GivenRows | None = None

    @contextmanager
    def within(self, given: GivenRows) -> Iterator[None]:
        """Use these in the next forward."""
        self._now = given
        try:
            yield
        finally:
            self._now = None

    def look_up(
        self, table: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the rows [T, E] of ids [T], with given embeddings in their places."""
        given = self._now
        if given is None:
            return table(ids)
        # Such a place has no token id.
        rows = table(ids.index_fill(0, given.index, 0))
        return rows.index_copy_(0, given.index, given.rows)
