"""Copy whole blocks of every layer within the pool."""

from __future__ import annotations

import torch

__all__ = ["copy_blocks"]


def copy_blocks(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Shapes as in the contract (`quire.ops.kv.copy_blocks`)."""
    sources = pages[:, src]  # advanced indexing copies: every source is read before any write
    pages[:, dst] = sources
