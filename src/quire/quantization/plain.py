"""Matrices in the dtype of the model."""

from __future__ import annotations

import torch

from quire.ops import OpSet, PackedMatrix

__all__ = ["PlainFormat"]


class PlainFormat:
    """`WeightFormat` that changes no number."""

    def __init__(self, ops: OpSet) -> None:
        self._ops = ops

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        return self._ops.gated_linear("linear", gate)(weight, bias)

    def cut(self, inputs: range) -> None:
        """No number is made of others."""
