"""Projections. A merged one is several checkpoint tensors in one matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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
        weight = torch.empty((out_features, in_features), dtype=dtype, device=device)
        biases = torch.empty((out_features,), dtype=dtype, device=device) if bias else None
        storage = {"weight": weight.t() if transposed else weight}
        if biases is not None:
            storage["bias"] = biases
        self.weights = PackedWeights(weight_format.pack, weight, biases, storage)

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
        sizes = list(parts.values())
        weight = torch.empty((sum(sizes), in_features), dtype=dtype, device=device)
        biases = torch.empty((sum(sizes),), dtype=dtype, device=device) if bias else None
        rows = zip(parts, weight.split(sizes), strict=True)
        storage = {f"{part}.weight": view for part, view in rows}
        if biases is not None:
            views = zip(parts, biases.split(sizes), strict=True)
            storage |= {f"{part}.bias": view for part, view in views}
        pack = partial(weight_format.pack, gate=gate)
        self.weights = PackedWeights(pack, weight, biases, storage)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weights.matrix(x)
