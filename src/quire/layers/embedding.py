"""Token and position tables, and the projection from hidden states to logits."""

from __future__ import annotations

import torch

from quire.layers.weights import DenseWeights
from quire.ops import OpSet

__all__ = ["Embedding", "LMHead"]


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
        return self._embedding(ids + self._offset if self._offset else ids, self.weight)


class LMHead:
    """Logits of hidden rows: [N, E] → float32 [N, V].

    tied: the embedding whose table is also the projection; then there is nothing to load.
    """

    def __init__(
        self,
        ops: OpSet,
        vocab_size: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tied: Embedding | None,
    ) -> None:
        self._linear = ops.linear
        if tied is None:
            self.weight = torch.empty((vocab_size, size), dtype=dtype, device=device)
            self.weights = DenseWeights({"weight": self.weight})
        else:
            self.weight = tied.weight
            self.weights = DenseWeights({})

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._linear(hidden, self.weight).float()
