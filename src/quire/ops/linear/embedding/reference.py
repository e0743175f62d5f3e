"""Rows of a table."""

from __future__ import annotations

import torch

__all__ = ["embedding"]


def embedding(ids: torch.Tensor, weight: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.linear.embedding`)."""
    return torch.nn.functional.embedding(ids + offset, weight)
