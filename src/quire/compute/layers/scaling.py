"""Factors on embeddings, queries, sublayers and logits, gates on outputs, and Gemma's cap."""

from __future__ import annotations

import torch

from quire.compute.layers.weights import DenseWeights, Placement
from quire.ops import OpSet

__all__ = ["OutputGate", "OwnFactor", "QueryGrowth", "Scale", "SoftCap"]


class Scale:
    """x · factor, in place. dtype: the factor is rounded to it first, as in training."""

    def __init__(self, ops: OpSet, factor: float, dtype: torch.dtype | None) -> None:
        self._rescale = ops.rescale
        self._factor = factor if dtype is None else float(torch.tensor(factor, dtype=dtype))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._rescale(x, self._factor)


class OwnFactor:
    """x · a number of the checkpoint, in place; x [T, E]."""

    def __init__(self, ops: OpSet, placement: Placement) -> None:
        self._rescale_rows = ops.rescale_rows
        self._factor = placement.empty(1)
        self.weights = DenseWeights({"": self._factor})

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._rescale_rows(x, self._factor)


class OutputGate:
    """y · sigmoid(gate) (Qiu et al. 2025, arXiv:2505.06708, section 2.2)."""

    def __init__(self, ops: OpSet) -> None:
        self._times = ops.activation_times

    def __call__(self, gate: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """gate, y [T, N], of any row strides → [T, N]."""
        return self._times(gate, y, "sigmoid")


class SoftCap:
    """cap · tanh(x / cap), in place (Gemma 2, arXiv:2408.00118, section 2)."""

    def __init__(self, ops: OpSet, cap: float) -> None:
        self._rescale = ops.rescale
        self._cap = cap

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._rescale(x, 1.0, self._cap)


class QueryGrowth:
    """q · (1 + beta · ln(1 + ⌊position / length⌋)), in place, so that far keys are told apart
    (Meta 2025, "The Llama 4 herd", attention temperature; Ministral 3)."""

    def __init__(
        self,
        ops: OpSet,
        beta: float,
        length: int,
        max_positions: int,
        placement: Placement,
    ) -> None:
        self._rescale_rows = ops.rescale_rows
        times = torch.arange(max_positions, device=placement.device) // length
        factors = 1.0 + beta * torch.log1p(times.float())
        self._factors = factors.to(placement.dtype)

    def __call__(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], positions [T]."""
        return self._rescale_rows(q, self._factors, positions)
