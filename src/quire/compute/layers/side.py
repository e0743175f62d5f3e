"""Vectors of tokens that each layer gets besides the residual stream (Gemma 3n and 4, per-layer
embeddings)."""

from __future__ import annotations

import torch

from quire.compute.layers.adapted import Projection
from quire.compute.layers.embedding import Embedding
from quire.compute.layers.norm import RMSNorm
from quire.compute.layers.scaling import Scale
from quire.ops import OpSet

__all__ = ["SideLayer", "TokenSide"]


class TokenSide:
    """Vectors for all layers: (norm(projection(x) / √E) + table[token] · √N) / √2."""

    def __init__(
        self,
        ops: OpSet,
        table: Embedding,
        projection: Projection,
        norm: RMSNorm,
        scales: tuple[Scale, Scale, Scale],
    ) -> None:
        """scales: scales of the table's rows, the projection and the sum."""
        self.table, self.projection, self.norm = table, projection, norm
        self._of_table, self._of_projection, self._of_sum = scales
        self._add = ops.add

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """token_ids [T], embeddings x [T, E] → [T, layers · N]."""
        rows = self._of_table(self.table(token_ids))
        size = self.norm.weight.shape[0]
        projected = self.norm(self._of_projection(self.projection(x)).view(-1, size))
        return self._of_sum(self._add(projected.view(rows.shape), rows))


class SideLayer:
    """norm(projection(act(gate(x)) · beside)); x [T, E], beside [T, N] → [T, E]."""

    def __init__(
        self, ops: OpSet, gate: Projection, projection: Projection, norm: RMSNorm, activation: str
    ) -> None:
        self.gate, self.projection, self.norm = gate, projection, norm
        self._activation_times = ops.activation_times
        self._kind = activation

    def __call__(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return self.norm(self.projection(self._activation_times(self.gate(x), beside, self._kind)))
