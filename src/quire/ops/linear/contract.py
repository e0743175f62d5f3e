"""What `linear` accepts, and what it returns: a matrix that was packed once and multiplies many
times."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.errors import EngineError

__all__ = ["PackedMatrix", "check_arguments"]


class PackedMatrix(Protocol):
    """W [O, I] and b [O], laid out as the provider likes. They may not be kept as they came."""

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [..., I] of any float dtype → x Wᵀ + b, [..., O] in x's dtype, or in float32 where
        `out_dtype` says so (logits): then the float32 sums as they are, not rounded between."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] integers → the rows W[ids], [T, I] (a tied embedding): bit for bit, or in the
        dtype that a matrix of integers was made for."""
        ...


def check_arguments(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises EngineError unless weight is [O, I] with O, I > 0 and bias is [O] or None."""
    if weight.dim() != 2 or weight.numel() == 0:
        raise EngineError(
            f"linear takes a matrix of at least one output and one input, not {list(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise EngineError(
            f"linear takes a bias of {weight.shape[0]} numbers, not of {list(bias.shape)}."
        )
