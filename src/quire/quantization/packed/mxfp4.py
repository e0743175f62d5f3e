"""Microscaled floating-point numbers of 4 bits (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.packed.schemes import MXFP4
from quire.quantization.gguf.tensor_types import E2M1_VALUES

__all__ = ["mxfp4"]

BLOCK = 32


def mxfp4(scheme: MXFP4, tensors: Mapping[str, torch.Tensor], outputs: slice) -> torch.Tensor:
    """table[q] · 2^(e - 127), low nibble first, with one exponent for 32 inputs."""
    del scheme
    by_blocks = "weight_blocks" in tensors
    packed = tensors["weight_blocks" if by_blocks else "weight_packed"][outputs].flatten(1)
    exponents = tensors["weight_scales" if by_blocks else "weight_scale"][outputs]
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=packed.device)
    numbers = table[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()]
    powers = exponents.view(torch.uint8).int() - 127
    return torch.ldexp(numbers.unflatten(1, (-1, BLOCK)), powers[..., None]).flatten(1)
