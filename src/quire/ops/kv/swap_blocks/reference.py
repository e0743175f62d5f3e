"""Copy whole blocks of every layer between two pools."""

from __future__ import annotations

import torch

__all__ = ["swap_blocks"]


def swap_blocks(
    source: torch.Tensor, target: torch.Tensor, src: torch.Tensor, dst: torch.Tensor
) -> None:
    """Shapes as in the contract (`quire.ops.kv.swap_blocks`)."""
    target[:, dst] = source[:, src].to(target.device)
