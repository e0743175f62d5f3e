"""Matrices in the dtype of the model."""

from __future__ import annotations

import torch

from quire.ops import OpSet, PackedMatrix

__all__ = ["PlainFormat"]


class PlainFormat:
    """`WeightFormat` that changes no number."""

    def __init__(self, ops: OpSet) -> None:
        self._linear = ops.linear

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
        return self._linear(weight, bias)
