"""Projections. A merged one is several checkpoint tensors in one matrix product."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.layers.weights import DenseWeights
from quire.ops import OpSet

__all__ = ["Linear", "MergedLinear"]


class Linear:
    """y = x Wᵀ + b; x [T, I] → [T, O].

    transposed: the checkpoint stores W as [I, O] (GPT-2's Conv1D).
    """

    def __init__(
        self,
        ops: OpSet,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
        transposed: bool = False,
    ) -> None:
        self._linear = ops.linear
        self.weight = torch.empty((out_features, in_features), dtype=dtype, device=device)
        self.bias = torch.empty((out_features,), dtype=dtype, device=device) if bias else None
        storage = {"weight": self.weight.t() if transposed else self.weight}
        if self.bias is not None:
            storage["bias"] = self.bias
        self.weights = DenseWeights(storage)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, self.weight, self.bias)


class MergedLinear:
    """Projections of one input, their outputs side by side; x [T, I] → [T, sum(parts)].

    parts: output size by name, in the order of the output.
    """

    def __init__(
        self,
        ops: OpSet,
        in_features: int,
        parts: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
    ) -> None:
        self._linear = ops.linear
        sizes = list(parts.values())
        self.weight = torch.empty((sum(sizes), in_features), dtype=dtype, device=device)
        self.bias = torch.empty((sum(sizes),), dtype=dtype, device=device) if bias else None
        rows = zip(parts, self.weight.split(sizes), strict=True)
        storage = {f"{part}.weight": view for part, view in rows}
        if self.bias is not None:
            biases = zip(parts, self.bias.split(sizes), strict=True)
            storage |= {f"{part}.bias": view for part, view in biases}
        self.weights = DenseWeights(storage)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, self.weight, self.bias)
