"""x[..., order]."""

from __future__ import annotations

import torch

__all__ = ["take_columns"]


def take_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Columns `order` of x, by torch."""
    return x.index_select(-1, order)
