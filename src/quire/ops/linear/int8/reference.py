"""y = x (scale · weight)ᵀ + b in 8-bit integers."""

from __future__ import annotations

import torch

from quire.ops.linear.int8.activations import quantize_rows
from quire.ops.linear.int8.contract import check_arguments
from quire.ops.linear.plain.reference import gated

__all__ = ["PlainInt8Matrix"]

EXACT_DEPTH = 1024
"""Sums of this many products of two 8-bit integers stay below 2**24, so float32 holds them."""


class PlainInt8Matrix:
    """`PackedMatrix` as it came. Products of integers are exact: in float32 piece by piece, and in
    float64 over the pieces."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        gate: str | None = None,
    ) -> None:
        check_arguments(weight, scale, bias, gate)
        self.weight, self.scale, self.dtype, self.gate = weight, scale, dtype, gate
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        quantized, x_scale = quantize_rows(x.reshape(-1, self.weight.shape[1]))
        products = quantized.new_zeros(len(quantized), len(self.weight), dtype=torch.float64)
        for part, weight in zip(
            quantized.split(EXACT_DEPTH, dim=1), self.weight.split(EXACT_DEPTH, dim=1), strict=True
        ):
            products += part @ weight.float().t()
        y = products.float() * x_scale * self.scale
        if self.bias is not None:
            y = y + self.bias
        y = y.to(out_dtype or x.dtype).view(*x.shape[:-1], len(self.weight))
        return gated(y, self.gate)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.long()
        return (self.weight[ids].float() * self.scale[ids].unsqueeze(-1)).to(self.dtype)
