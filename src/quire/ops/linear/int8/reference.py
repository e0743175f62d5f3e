"""y = x (scale · weight)ᵀ + b in 8-bit integers."""

from __future__ import annotations

import torch

from quire.ops.linear.int8.activations import (
    largest_magnitudes,
    quantize_rows,
    scales_of_rows,
)
from quire.ops.linear.int8.contract import check_arguments
from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.linear.plain.reference import gated
from quire.ops.linear.plain.widened import WidenedMatrix
from quire.ops.linear.rotate.reference import rotate

__all__ = ["PlainInt8Matrix", "linear_int8"]

EXACT_DEPTH = 1024
"""Sums of this many products of two 8-bit integers stay below 2**24, so float32 is exact."""


class PlainInt8Matrix:
    """A `PackedMatrix` and `PartialMatrix` that keeps its weight unchanged. Products of integers
    are exact: in float32 within a piece, and in float64 over the pieces."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        gate: str | None = None,
        rotation: int = 1,
    ) -> None:
        check_arguments(weight, scale, bias, gate, rotation)
        self.weight, self.scale, self.dtype, self.gate = weight, scale, dtype, gate
        self.bias = None if bias is None else bias.float()
        self.rotation = rotation

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        rows = x.reshape(-1, self.weight.shape[1])
        largest = self.largest(rows)
        y = self.complete(self.partial(rows, largest), largest, out_dtype or x.dtype)
        return gated(y.view(*x.shape[:-1], len(self.weight)), self.gate)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return largest_magnitudes(rotate(x, self.rotation))

    def partial(self, x: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
        quantized, _ = quantize_rows(rotate(x, self.rotation), largest)
        products = quantized.new_zeros(len(quantized), len(self.weight), dtype=torch.float64)
        for part, weight in zip(
            quantized.split(EXACT_DEPTH, dim=1), self.weight.split(EXACT_DEPTH, dim=1), strict=True
        ):
            products += part @ weight.float().t()
        return products.to(torch.int32)

    def complete(
        self, sums: torch.Tensor, largest: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert largest is not None, "rows became integers by it"
        y = sums.float() * scales_of_rows(largest) * self.scale
        return (y if self.bias is None else y + self.bias).to(out_dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.long()
        rotated = self.weight[ids].float() * self.scale[ids].unsqueeze(-1)
        return rotate(rotated, self.rotation).to(self.dtype)


def linear_int8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    gate: str | None = None,
    rotation: int = 1,
    activation_bits: int = 8,
) -> PackedMatrix:
    """Contract in `quire.ops.linear.int8`."""
    if activation_bits == 8:
        return PlainInt8Matrix(weight, scale, bias, dtype=dtype, gate=gate, rotation=rotation)
    stored = PlainInt8Matrix(weight, scale)
    return WidenedMatrix(stored, len(weight), bias, dtype=dtype, gate=gate, rotation=rotation)
