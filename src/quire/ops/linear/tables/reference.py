"""y = x Wᵀ + b with weights looked up first."""

from __future__ import annotations

import torch

from quire.ops.linear.plain.reference import PlainMatrix
from quire.ops.linear.tables.contract import Tables, check_arguments

__all__ = ["PlainTableMatrix"]


class PlainTableMatrix(PlainMatrix):
    """A `PackedMatrix` with all weights in `dtype`."""

    def __init__(
        self,
        weight: Tables,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        gate: str | None = None,
    ) -> None:
        check_arguments(weight, bias, gate)
        super().__init__(weight.numbers().to(dtype), bias, gate=gate)
