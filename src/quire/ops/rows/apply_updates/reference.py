"""Set single words of a state."""

from __future__ import annotations

import torch

__all__ = ["apply_updates"]


def apply_updates(state: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Shapes as in the contract (`quire.ops.rows.apply_updates`)."""
    state.index_copy_(0, indices.long(), values)
