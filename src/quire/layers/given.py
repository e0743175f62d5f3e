"""Embeddings that a request brings itself, in place of rows of the table of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from quire.attention.step_inputs import GivenRows

__all__ = ["GivenEmbeddings"]


class GivenEmbeddings:
    """Embeddings that replace rows of the token table in the running forward. A model is built with
    one, so that its file passes nothing on.

    width: elements of a row; 0 before the table is made.
    """

    def __init__(self) -> None:
        self.width = 0
        self._now: GivenRows | None = None

    @contextmanager
    def within(self, given: GivenRows) -> Iterator[None]:
        """The next forward computes with these."""
        self._now = given
        try:
            yield
        finally:
            self._now = None

    def look_up(
        self, table: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
    ) -> torch.Tensor:
        """Rows [T, E] of the table for ids [T], and given ones where there are some."""
        given = self._now
        if given is None:
            return table(ids)
        # There is no id in such a place.
        rows = table(ids.index_fill(0, given.index, 0))
        return rows.index_copy_(0, given.index, given.rows)
