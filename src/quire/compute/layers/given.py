"""Embeddings that a request brings itself, in place of rows of the token table, and vectors that
come with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from quire.compute.attention.step_inputs import GivenRows
from quire.compute.layers.scaling import Scale

__all__ = ["DeepStack", "EmbeddingScale", "GivenEmbeddings"]


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
        return self.put(table(ids.index_fill(0, given.index, 0)))

    def put(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [T, E], changed in place: with given embeddings in their places."""
        given = self._now
        if given is None:
            return rows
        return rows.index_copy_(0, given.index, given.rows[:, : self.width])

    def add_deep(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """Return x [T, E] with the vectors `place` of given rows added; 0 is the first one behind
        the embedding. Rows without such a vector add nothing."""
        given, start = self._now, (1 + place) * self.width
        if given is None or given.rows.shape[1] <= start:
            return x
        return x.index_add(0, given.index, given.rows[:, start : start + self.width])


class EmbeddingScale:
    """x · factor, in place, for rows of the token table; given embeddings stay as they are."""

    def __init__(self, scale: Scale, given: GivenEmbeddings) -> None:
        self._scale, self._given = scale, given

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, E], from the embedding → [T, E]."""
        return self._given.put(self._scale(x))


class DeepStack:
    """Addition of one vector of each given row to the stream (DeepStack, Meng et al. 2024,
    arXiv:2406.04334)."""

    def __init__(self, given: GivenEmbeddings, place: int) -> None:
        """place: see `GivenEmbeddings.add_deep`."""
        self._given, self._place = given, place

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, E] → [T, E]."""
        return self._given.add_deep(x, self._place)
