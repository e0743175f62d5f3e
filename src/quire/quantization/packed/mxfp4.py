"""Microscaled floating-point numbers of 4 bits (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.config.packed.block_kinds import BLOCK_KINDS
from quire.config.packed.schemes import MXFP4
from quire.ops.linear.blocks.contract import Blocks
from quire.quantization.gguf.tensor_types import e2m1_scale

__all__ = ["mxfp4"]


def mxfp4(scheme: MXFP4, tensors: Mapping[str, torch.Tensor], outputs: slice) -> Blocks:
    """e2m1[q] · 2^(e - 127), low nibble first, with one exponent for 32 inputs."""
    del scheme
    by_blocks = "weight_blocks" in tensors
    packed = tensors["weight_blocks" if by_blocks else "weight_packed"][outputs].flatten(1)
    exponents = tensors["weight_scales" if by_blocks else "weight_scale"][outputs]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return Blocks(BLOCK_KINDS["e2m1"], codes, e2m1_scale(exponents.view(torch.uint8)))
