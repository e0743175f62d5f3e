"""y = x (scale · level + offset)ᵀ + b in integers, group by group."""

from __future__ import annotations

import torch

from quire.ops.linear.blocks.contract import (
    Blocks,
    check_arguments,
    pack_scales,
    quantize_groups,
)
from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.linear.plain.reference import gated
from quire.ops.linear.plain.widened import WidenedMatrix

__all__ = ["PlainBlockMatrix", "linear_blocks"]


class PlainBlockMatrix:
    """A `PackedMatrix` with a byte per code. Sums within a group are integers below 2**24, which
    float32 holds exactly."""

    def __init__(
        self,
        weight: Blocks,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        gate: str | None = None,
    ) -> None:
        check_arguments(weight, bias, gate)
        scale, minimum, self.power = pack_scales(weight)
        self.weight = weight._replace(
            scale=scale.float(), minimum=None if minimum is None else minimum.float()
        )
        self.bias = None if bias is None else bias.float()
        self.dtype, self.gate = dtype, gate

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        weight, size = self.weight, self.weight.kind.group_size
        levels, scales = weight.levels(), weight.group_scales()
        offsets = weight.group_offsets()
        rounded, x_scales = quantize_groups(x.reshape(-1, levels.shape[1]), size)
        y = rounded.new_zeros(len(rounded), len(levels))
        for group in range(weight.num_groups):
            part, x_scale = rounded[:, group], x_scales[:, group]
            product = part @ levels[:, group * size : (group + 1) * size].t()
            y += product * x_scale * scales[:, group]
            if offsets is not None:
                y += part.sum(dim=1, keepdim=True) * x_scale * offsets[:, group]
        y *= self.power
        y = (y if self.bias is None else y + self.bias).to(out_dtype or x.dtype)
        return gated(y.view(*x.shape[:-1], len(levels)), self.gate)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.long()
        chosen = (None if part is None else part[ids.flatten()] for part in self.weight.tensors())
        numbers = Blocks(self.weight.kind, *chosen).numbers()  # type: ignore[arg-type]
        numbers *= self.power[ids.flatten()].unsqueeze(-1)
        return numbers.view(*ids.shape, -1).to(self.dtype)


def linear_blocks(
    weight: Blocks,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    gate: str | None = None,
    activation_bits: int = 8,
) -> PackedMatrix:
    """Contract in `quire.ops.linear.blocks`."""
    if activation_bits == 8:
        return PlainBlockMatrix(weight, bias, dtype=dtype, gate=gate)
    stored = PlainBlockMatrix(weight)
    return WidenedMatrix(stored, len(weight.codes), bias, dtype=dtype, gate=gate)
