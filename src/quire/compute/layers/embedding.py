"""Token and position tables, and the projection from hidden states to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from quire.compute.layers.adapter_contents import HeadPlace, TablePlace
from quire.compute.layers.given import GivenEmbeddings
from quire.compute.layers.linear import Linear
from quire.compute.layers.weights import (
    Cut,
    DenseWeights,
    LayerWeights,
    Outputs,
    PackedWeights,
    Placement,
)
from quire.compute.quantization import WeightFormat
from quire.config.shard import Shard, Share
from quire.ops import OpSet, PackedMatrix
from quire.ops.distributed import Collectives

__all__ = ["Embedding", "LMHead", "LogitParts", "TiedEmbedding", "TokenEmbedding", "Vocabulary"]


class LogitParts:
    """Logits of which each rank may keep its part, as tokens can be drawn from parts. A model is
    built with one, so that its file passes nothing on.

    own, total: tokens of this rank and of all; none where logits are always gathered.
    """

    def __init__(self) -> None:
        self.own, self.total = range(0), 0
        self.are_kept = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Logits that the model gives meanwhile are those of this rank [N, most]."""
        self.are_kept = True
        try:
            yield
        finally:
            self.are_kept = False


class Vocabulary:
    """A rank's share of the model's tokens.

    share: tokens of this rank. most: rows for which each rank has memory.
    """

    def __init__(
        self,
        size: int,
        shard: Shard,
        collectives: Collectives,
        given: GivenEmbeddings,
        parts: LogitParts,
        adapted: tuple[TablePlace, HeadPlace] | None = None,
    ) -> None:
        """given: embeddings that requests bring in place of rows. parts: switch for logits that
        stay in parts. adapted: places for changes that adapters make to the table, and to logits
        when all are gathered. Raises ConfigError like `Shard.vocabulary`."""
        self.share = shard.vocabulary(size)
        self.most = shard.most_rows(size)
        (self._own,) = self.share.ranges
        self._size = size
        self._collectives = collectives
        self._given, self._parts = given, parts
        if adapted is None:
            parts.own, parts.total = self._own, size
        self._table, self._head = adapted or (None, None)

    def look_up(
        self, ids: torch.Tensor, rows: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the rows [T, E] of ids [T] from all ranks' tables, with given embeddings in their
        places. rows: looks up this rank's table."""
        return self._given.look_up(lambda found: self._of_all_ranks(found, rows), ids)

    def _of_all_ranks(
        self, ids: torch.Tensor, rows: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if self.share.is_whole:
            found = rows(ids)
        else:
            found = self._collectives.look_up(ids, self._own, self.most, rows)
        return found if self._table is None else self._table.change(found, ids)

    def gather(self, logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden [N, E] from those of this rank, [N, most], unless these are
        kept."""
        if self._parts.are_kept:
            return logits
        everyone = self._collectives.all_gather(logits)
        everyone = everyone if everyone.shape[1] == self._size else everyone[:, : self._size]
        return everyone if self._head is None else self._head.change(everyone, hidden)


class Embedding:
    """Rows of a table [V, E]; ids [T] → [T, E]. offset: added to every id (OPT's positions)."""

    def __init__(
        self,
        ops: OpSet,
        num_rows: int,
        size: int,
        placement: Placement,
        *,
        offset: int = 0,
    ) -> None:
        self._embedding = ops.embedding
        self._offset = offset
        self.weight = placement.empty(num_rows, size)
        self.weights = DenseWeights({"weight": self.weight})

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(ids, self.weight, self._offset)


class TokenEmbedding:
    """The embedding of a vocabulary [V, E]; ids [T] → [T, E]."""

    def __init__(
        self,
        ops: OpSet,
        vocabulary: Vocabulary,
        size: int,
        placement: Placement,
    ) -> None:
        self._embedding = ops.embedding
        self._vocabulary = vocabulary
        self.weight = placement.empty(vocabulary.share.count, size)
        self.weights = DenseWeights({"weight": self.weight}, cuts=_cuts(vocabulary))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.look_up(ids, lambda own: self._embedding(own, self.weight))


class TiedEmbedding:
    """An embedding whose table is also the projection to logits.

    There is one copy of the table, packed for the projection, which reads all of it at every step.
    The few rows that a step looks up are unpacked from it.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        vocabulary: Vocabulary,
        size: int,
        placement: Placement,
    ) -> None:
        self._vocabulary = vocabulary
        self.weights: PackedWeights[PackedMatrix] = PackedWeights(
            weight_format,
            Share.whole(size),
            Outputs({"": vocabulary.share}, num_outputs=vocabulary.most),
            placement,
            bias=False,
        )

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.look_up(ids, self.weights.matrix.rows)


class LMHead:
    """Logits of hidden rows: [N, E] → float32 [N, V].

    projection: a matrix of its own, or the embedding's, which needs no loading here.
    """

    def __init__(self, projection: Linear | TiedEmbedding, vocabulary: Vocabulary) -> None:
        self._table = projection.weights
        self._vocabulary = vocabulary
        tied = isinstance(projection, TiedEmbedding)
        self.weights: LayerWeights = DenseWeights({}) if tied else projection.weights

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.gather(self._table.matrix(hidden, torch.float32), hidden)


def _cuts(vocabulary: Vocabulary) -> dict[str, Cut]:
    return {} if vocabulary.share.is_whole else {"weight": Cut(0, vocabulary.share)}
