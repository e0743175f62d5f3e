"""Floating-point numbers of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.packed.schemes import Float8
from quire.quantization.packed.integers import spread

__all__ = ["float8"]

SIGN_EXPONENT_MANTISSA = -0x8000 | 0x3F80
"""Bits of e4m3 within float16; those of the sign that int16 repeats are left out."""


def float8(scheme: Float8, tensors: Mapping[str, torch.Tensor], outputs: slice) -> torch.Tensor:
    """q · s, with one scale for the matrix, for each output, or for each block."""
    numbers = _widened(tensors["weight"][outputs])
    scale = tensors[scheme.scale_of(tensors)].float()
    if scale.numel() == 1:
        return numbers * scale.reshape(())
    if scheme.block is None:
        return numbers * scale.reshape(-1, 1)[outputs]
    rows, columns = scheme.block
    row = torch.arange(outputs.start, outputs.stop, device=scale.device) // rows
    return numbers * spread(scale[row], columns, numbers.shape[1])


def _widened(numbers: torch.Tensor) -> torch.Tensor:
    """e4m3 → float32, as its own conversion does for all that is finite, several times as fast:
    with the exponent's 4 bits in float16's 5, whose bias is larger by 8, it is the number less a
    factor of 2^8, small ones that are not normal included."""
    bits = numbers.view(torch.int8).to(torch.int16)
    return (bits << 7 & SIGN_EXPONENT_MANTISSA).view(torch.float16).float().mul_(256)
