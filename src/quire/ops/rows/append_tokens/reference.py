"""Append drawn tokens to their rows."""

from __future__ import annotations

import torch

__all__ = ["append_tokens"]


def append_tokens(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    num_tokens: torch.Tensor,
    row_tokens: torch.Tensor,
    spare: int,
    positions: torch.Tensor | None,
) -> None:
    """Shapes as in the contract (`quire.ops.rows.append_tokens`)."""
    is_row = slots != spare
    at = num_tokens[slots]
    kept = row_tokens[slots, at]
    row_tokens[slots, at] = torch.where(is_row, token_ids.clamp(min=0).to(kept.dtype), kept)
    num_computed[slots] = torch.where(is_row, at, num_computed[slots])
    num_tokens[slots] = torch.where(is_row, at + 1, at)
    if positions is not None:
        positions.copy_(num_tokens[slots])
