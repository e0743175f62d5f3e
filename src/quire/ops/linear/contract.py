"""What `linear` returns: a matrix that was packed once and multiplies many times."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["PackedMatrix"]


class PackedMatrix(Protocol):
    """W [O, I] and b [O], laid out as the provider likes. They may not be kept as they came."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] of any float dtype → x Wᵀ + b, [..., O] in x's dtype. Sums are float32."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] integers → the rows W[ids], [T, I] (a tied embedding): bit for bit, or in the
        dtype that a matrix of integers was made for."""
        ...
