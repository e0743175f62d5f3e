"""Products of activations as they are with matrices of integers, which become floats first."""

from __future__ import annotations

import torch

from quire.ops.linear.plain.contract import PackedMatrix
from quire.ops.linear.plain.reference import PlainMatrix
from quire.ops.linear.rotate.reference import check_rotation, rotate, rotation_part

__all__ = ["WidenedMatrix"]


class WidenedMatrix(PlainMatrix):
    """A `PackedMatrix` with all weights in `dtype`.

    stored: the matrix [outputs, I] of rotated inputs, which gives its numbers in float32. Rotated
    rows are divided by `rotation_part`, rounded to their dtype, and multiplied by the numbers times
    that.
    """

    def __init__(
        self,
        stored: PackedMatrix,
        outputs: int,
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        gate: str | None,
        rotation: int = 1,
    ) -> None:
        numbers = stored.rows(torch.arange(outputs))
        check_rotation(rotation, numbers.shape[1])
        self._stored, self._rotation, self._dtype = stored, rotation, dtype
        super().__init__((numbers * rotation_part(rotation)).to(dtype), bias, gate=gate)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._rotation != 1:
            x = (rotate(x, self._rotation) / rotation_part(self._rotation)).to(x.dtype)
        return super().__call__(x, out_dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return rotate(self._stored.rows(ids), self._rotation).to(self._dtype)
