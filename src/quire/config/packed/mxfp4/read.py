"""Meaning of the bits of microscaled numbers of 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.config.packed.block_kinds import BLOCK_KINDS
from quire.config.packed.mxfp4.scheme import MXFP4
from quire.config.packed.read import Part, Reading, Tensors, axes_of, check_exponents
from quire.ops.linear.blocks.contract import Blocks

__all__ = ["READINGS", "e2m1_scale"]


def mxfp4(scheme: MXFP4, tensors: Mapping[str, torch.Tensor], outputs: slice) -> Blocks:
    """e2m1[q] · 2^(e - 127), low nibble first, with one exponent for 32 inputs."""
    del scheme
    by_blocks = "weight_blocks" in tensors
    packed = tensors["weight_blocks" if by_blocks else "weight_packed"][outputs].flatten(1)
    exponents = tensors["weight_scales" if by_blocks else "weight_scale"][outputs]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return Blocks(BLOCK_KINDS["e2m1"], codes, e2m1_scale(exponents.view(torch.uint8)))


def cut_mxfp4(scheme: MXFP4, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    del scheme
    outputs, inputs = axes_of(part)
    widths = {"weight_packed": 16, "weight_scale": 1, "weight_blocks": 1, "weight_scales": 1}
    return {
        kind: inputs.of(outputs.of(tensor, 0), 1, 32, widths[kind])
        for kind, tensor in tensors.items()
    }


def e2m1_scale(exponents: torch.Tensor) -> torch.Tensor:
    """uint8, less 127 exponents of 2 → float32 factors of twice the numbers of e2m1."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 128)


def _check(scheme: MXFP4, tensors: Tensors, shape: tuple[int, int]) -> None:
    del scheme, shape
    check_exponents(tensors, "weight_scale", "weight_scales")


READINGS: Mapping[type, Reading] = MappingProxyType({MXFP4: Reading(mxfp4, cut_mxfp4, _check)})
