"""Matrices as the checkpoint has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.compute.quantization.packed import StoredMatrix, keep, keep_partial
from quire.ops import OpSet, PackedMatrix, PartialMatrix

__all__ = ["PlainFormat"]


class PlainFormat:
    """`WeightFormat` that changes no number: plain matrices in the dtype of the model, quantized
    ones with their bits. by_torch: whether torch multiplies any of those so far."""

    keeps_stored = True

    def __init__(self, ops: OpSet) -> None:
        self._ops = ops
        self.by_torch = False

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gate: str | None = None
    ) -> PackedMatrix:
        return self._ops.gated_linear("linear", gate)(weight, bias)

    def shared(self, inputs: int, unit: int) -> PlainFormat:  # noqa: ARG002
        """No number is made of others."""
        return self

    def cut(self, inputs: range) -> None:
        """No number is made of others."""

    def keep(
        self,
        parts: Sequence[StoredMatrix | torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gate: str | None = None,
    ) -> PackedMatrix:
        kept = keep(self._ops, parts, bias, dtype, gate=gate)
        self.by_torch = self.by_torch or kept.by_torch
        return kept.matrix

    def keep_partial(
        self, part: StoredMatrix, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PartialMatrix:
        kept = keep_partial(self._ops, part, bias, dtype)
        self.by_torch = self.by_torch or kept.by_torch
        return kept.matrix
