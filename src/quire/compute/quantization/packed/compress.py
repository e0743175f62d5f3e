"""Matrices in quire's own formats as tensors of the compressed-tensors library."""

from __future__ import annotations

import math

import torch

from quire.compute.quantization.int4 import quantize_int4
from quire.compute.quantization.int8 import quantize_int8
from quire.config.quantization import INT4_FORMATS
from quire.ops.linear.int4.contract import SYMMETRIC_ZERO, pack_scale

__all__ = ["compress"]

MIDDLE = 128
"""Middle of the range of 8 bits; numbers stored in words are never negative."""


def compress(
    name: str, weight: torch.Tensor, *, words: bool, rotation: int
) -> dict[str, torch.Tensor]:
    """weight [O, I] in the format `name` of `quire.config.quantization`, by what follows the
    module's name. words: 8 bits are packed into words too (pack-quantized), as 4 bits always are.
    rotation: inputs of a block that is rotated.

    Scales are those that the kernels use, in float32, times the root of `rotation`: a power of two
    in 8 bits, and in 4 bits scales have 11, so the kernels make the same of them again.
    """
    shape, root = torch.tensor(weight.shape), math.sqrt(rotation)
    if name == "int8":
        values, scale = quantize_int8(weight, rotation)
        scale *= root
        if not words:
            return {"weight": values, "weight_scale": scale[:, None].contiguous()}
        packed = _words((values.to(torch.int16) + MIDDLE).to(torch.uint8), 8)
        return {"weight_packed": packed, "weight_scale": scale[:, None], "weight_shape": shape}
    groups = INT4_FORMATS[name]
    values, scale, zeros = quantize_int4(
        weight, groups.size, zero_points=groups.zero_points, rotation=rotation
    )
    half, power = pack_scale(scale)
    tensors = {
        "weight_packed": _words(values, 4),
        "weight_scale": half.float() * power[:, None] * root,
        "weight_shape": shape,
    }
    if zeros is not None:
        rows = torch.nn.functional.pad(zeros, (0, 0, 0, -len(zeros) % 8), value=SYMMETRIC_ZERO)
        tensors["weight_zero_point"] = _words(rows.t(), 4).t().contiguous()
    return tensors


def _words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [R, n] → int32 [R, n · bits / 32], the first number in the lowest bits; padded with
    zeros to whole words."""
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % (32 // bits)))
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    return values.reshape(-1).view(torch.int32).view(len(values), -1)
