"""y = x (scale · (weight - zero))ᵀ + b in integers, group by group."""

from __future__ import annotations

import torch

from quire.ops.linear.int4.contract import SYMMETRIC_ZERO, check_arguments, pack_scale
from quire.ops.linear.int8.activations import (
    largest_magnitudes,
    quantize_rows,
    scales_of_rows,
)
from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.linear.plain.reference import gated
from quire.ops.linear.plain.widened import WidenedMatrix
from quire.ops.linear.rotate.reference import rotate

__all__ = ["PlainInt4Matrix", "linear_int4"]


class PlainInt4Matrix:
    """A `PackedMatrix` and `PartialMatrix` with a byte per value. Sums within a group are integers
    below 2**24, which float32 holds exactly."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        gate: str | None = None,
        rotation: int = 1,
    ) -> None:
        self.group_size = check_arguments(weight, scale, zero, bias, gate, rotation)
        shift = SYMMETRIC_ZERO if zero is None else zero.to(torch.int8).unsqueeze(-1)
        grouped = weight.to(torch.int8).unflatten(1, (-1, self.group_size))
        self.weight = (grouped - shift).flatten(1)
        self.scale, self.power = pack_scale(scale)
        self.bias = None if bias is None else bias.float()
        self.dtype, self.gate, self.rotation = dtype, gate, rotation

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        rows = x.reshape(-1, self.weight.shape[1])
        largest = self.largest(rows)
        y = self.complete(self.partial(rows, largest), largest, out_dtype or x.dtype)
        return gated(y.view(*x.shape[:-1], len(self.weight)), self.gate)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return largest_magnitudes(rotate(x, self.rotation))

    def partial(self, x: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
        quantized, _ = quantize_rows(rotate(x, self.rotation), largest)
        sums = quantized.new_zeros(len(quantized), len(self.weight))
        for part, weight, scale in zip(
            quantized.split(self.group_size, dim=1),
            self.weight.split(self.group_size, dim=1),
            self.scale.float().unbind(dim=1),
            strict=True,
        ):
            sums += (part @ weight.float().t()) * scale
        return sums * self.power  # a power of two, so nothing is rounded

    def complete(
        self, sums: torch.Tensor, largest: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert largest is not None, "rows became integers by it"
        y = sums * scales_of_rows(largest)
        return (y if self.bias is None else y + self.bias).to(out_dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.long()
        scale = self.scale[ids].float() * self.power[ids].unsqueeze(-1)
        grouped = self.weight[ids].float().unflatten(-1, (-1, self.group_size))
        return rotate((grouped * scale.unsqueeze(-1)).flatten(-2), self.rotation).to(self.dtype)


def linear_int4(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    gate: str | None = None,
    rotation: int = 1,
    activation_bits: int = 8,
) -> PackedMatrix:
    """Contract in `quire.ops.linear.int4`."""
    if activation_bits == 8:
        return PlainInt4Matrix(weight, scale, zero, bias, dtype=dtype, gate=gate, rotation=rotation)
    stored = PlainInt4Matrix(weight, scale, zero)
    return WidenedMatrix(stored, len(weight), bias, dtype=dtype, gate=gate, rotation=rotation)
