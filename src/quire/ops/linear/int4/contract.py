"""Contract of `linear_int4`: its inputs, and its stored form of scales."""

from __future__ import annotations

import torch

from quire.base.errors import EngineError
from quire.ops.linear.plain.contract import check_gate
from quire.ops.linear.rotate.reference import check_rotation

__all__ = ["GROUP_SIZES", "SYMMETRIC_ZERO", "check_arguments", "pack_scale"]

GROUP_SIZES = (32, 64, 128)
SYMMETRIC_ZERO = 8
"""Zero point if none is given."""


def check_arguments(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: str | None = None,
    rotation: int = 1,
) -> int:
    """Return the group size. Raises EngineError unless weight is uint8 [O, I] with values 0 to 15,
    scale float32 [O, I / G] for a group size G, zero uint8 of scale's shape or None, bias [O] or
    None, and as `check_gate` and `check_rotation`."""
    if weight.dtype != torch.uint8 or weight.dim() != 2 or weight.numel() == 0:
        raise EngineError(
            "linear_int4 takes a uint8 matrix with one 4-bit value per element, not "
            f"{weight.dtype}{list(weight.shape)}."
        )
    outputs, depth = weight.shape
    group_size = next((g for g in GROUP_SIZES if scale.shape == (outputs, depth / g)), None)
    if scale.dtype != torch.float32 or group_size is None:
        raise EngineError(
            f"linear_int4 takes one float32 scale per {', '.join(map(str, GROUP_SIZES))} inputs "
            f"of a {outputs} × {depth} weight, not {scale.dtype}{list(scale.shape)}."
        )
    if zero is not None and (zero.dtype != torch.uint8 or zero.shape != scale.shape):
        raise EngineError(
            f"linear_int4 takes uint8 zero points in the shape of the scales {list(scale.shape)}, "
            f"not {zero.dtype}{list(zero.shape)}."
        )
    if bias is not None and bias.shape != (outputs,):
        raise EngineError(
            f"linear_int4 takes a bias of {outputs} numbers, not of {list(bias.shape)}."
        )
    check_gate(outputs, gate)
    check_rotation(rotation, depth)
    for name, values in (("weight", weight), ("zero", zero)):
        if values is not None and (largest := int(values.max())) > 15:
            raise EngineError(f"linear_int4 takes 4-bit values; {name} holds {largest}.")
    return group_size


def pack_scale(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split scale [O, I / G] into float16 [O, I / G] and a power of two float32 [O], whose product
    is the scale that the layer uses. It has 11 significant bits for any size of weights, and is
    exact for scales given in float16. Groups 2**-25 below the largest of their output become zero.
    """
    largest = scale.abs().amax(dim=1, keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp(-100, 100)
    power = torch.ldexp(torch.ones_like(largest), exponent)
    return (scale / power).half(), power.squeeze(1)
