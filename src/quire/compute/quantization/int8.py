"""8 bits per weight, one scale per output channel."""

from __future__ import annotations

import torch

from quire.compute.quantization.weight_format import Rotate, WidensStored, row_blocks
from quire.config.quantization import rotation_of, rotation_within, shared_rotation
from quire.ops import OpSet, PackedMatrix, PartialMatrix
from quire.ops.linear.rotate import rotate

__all__ = ["Int8Format", "quantize_int8"]

LARGEST = 127
"""-128 is left out, so that the range is symmetric."""


class Int8Format(WidensStored):
    """`WeightFormat` for any number of outputs, and inputs up to `INT8_MAX_INPUTS`. rotation: the
    block in which inputs are rotated; None for what `rotation_of` says of a matrix."""

    def __init__(self, ops: OpSet, rotation: int | None = None) -> None:
        self._ops, self._rotation = ops, rotation

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        rotation = self._rotation or rotation_of("int8", weight.shape[1])
        values, scale = quantize_int8(weight, rotation, self._ops.rotate)
        linear = self._ops.gated_linear("linear_int8", gate)
        return linear(values, scale, bias, dtype=weight.dtype, rotation=rotation)

    def shared(self, inputs: int, unit: int) -> Int8Format:
        return Int8Format(self._ops, shared_rotation("int8", inputs, unit))

    def cut(self, inputs: range) -> _CutInt8:
        return _CutInt8(self._ops, inputs, rotation_within(self._rotation or 1, inputs))


class _CutInt8:
    """Scales are those of whole rows."""

    def __init__(self, ops: OpSet, inputs: range, rotation: int) -> None:
        self._ops, self._rotation = ops, rotation
        self._inputs = slice(inputs.start, inputs.stop)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PartialMatrix:
        values, scale = quantize_int8(weight, self._rotation, self._ops.rotate)
        linear = self._ops.partial_linear("linear_int8")
        part = values[:, self._inputs]
        return linear(part, scale, bias, dtype=weight.dtype, rotation=self._rotation)


def quantize_int8(
    weight: torch.Tensor, rotation: int = 1, rotate: Rotate = rotate
) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [O, I] → int8 [O, I] in [-127, 127] and float32 scales [O]; weight ≈ scale · value, of
    inputs that are rotated in blocks of `rotation`, by `rotate`.

    Symmetric, scale = max|weight| / 127 of each output (Jacob et al. 2018, arXiv:1712.05877,
    section 3; per channel as in Krishnamoorthi 2018, arXiv:1806.08342, section 3.1). A row of
    zeros has scale 0.
    """
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for rows, block in row_blocks(weight, rotation, rotate):
        scale = block.abs().amax(1) / LARGEST
        divisor = torch.where(scale == 0, 1.0, scale)
        values[rows] = (block / divisor[:, None]).round_().clamp_(-LARGEST, LARGEST)
        scales[rows] = scale
    return values, scales
