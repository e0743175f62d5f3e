"""Projections. A merged one is several checkpoint tensors in one matrix product."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.layers.weights import PackedWeights
from quire.quantization import WeightFormat

__all__ = ["Linear", "MergedLinear"]


class Linear:
    """y = x Wᵀ + b; x [T, I] → [T, O].

    transposed: the checkpoint stores W as [I, O] (GPT-2's Conv1D).
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        parts = {"": out_features}
        self.weights = PackedWeights(
            weight_format, in_features, parts, dtype, device, bias=bias, transposed=transposed
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights.matrix(x)


class MergedLinear:
    """Projections of one input, their outputs side by side; x [T, I] → [T, sum(parts)].

    parts: output size by name, in the order of the output. gate: an activation of the first of two
    parts of one size, times the second; [T, its size].
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        in_features: int,
        parts: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
        gate: str | None = None,
    ) -> None:
        self.weights = PackedWeights(
            weight_format, in_features, parts, dtype, device, bias=bias, gate=gate
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights.matrix(x)
