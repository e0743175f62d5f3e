"""Token and position tables, and the projection from hidden states to logits."""

from __future__ import annotations

import torch

from quire.layers.linear import Linear
from quire.layers.weights import DenseWeights, LayerWeights, PackedWeights
from quire.ops import OpSet
from quire.quantization import WeightFormat

__all__ = ["Embedding", "LMHead", "TiedEmbedding"]


class Embedding:
    """Rows of a table [V, E]; ids [T] → [T, E]. offset: added to every id (OPT's positions)."""

    def __init__(
        self,
        ops: OpSet,
        num_rows: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offset: int = 0,
    ) -> None:
        self._embedding = ops.embedding
        self._offset = offset
        self.weight = torch.empty((num_rows, size), dtype=dtype, device=device)
        self.weights = DenseWeights({"weight": self.weight})

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(ids, self.weight, self._offset)


class TiedEmbedding:
    """An embedding whose table is also the projection to logits.

    There is one copy of the table, packed for the projection, which runs over all of it at every
    step; the few rows that a step looks up are gathered out of the packed form.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        num_rows: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weights = PackedWeights(weight_format, size, {"": num_rows}, dtype, device, bias=False)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weights.matrix.rows(ids)


class LMHead:
    """Logits of hidden rows: [N, E] → float32 [N, V].

    projection: a matrix of its own, or the embedding's; then there is nothing to load.
    """

    def __init__(self, projection: Linear | TiedEmbedding) -> None:
        self._table = projection.weights
        tied = isinstance(projection, TiedEmbedding)
        self.weights: LayerWeights = DenseWeights({}) if tied else projection.weights

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._table.matrix(hidden, torch.float32)
