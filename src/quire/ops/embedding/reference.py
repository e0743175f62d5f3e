"""Rows of a table."""

from __future__ import annotations

import torch

__all__ = ["embedding"]


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.embedding`)."""
    return torch.nn.functional.embedding(token_ids, weight)
