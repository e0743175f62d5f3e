"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467, equation 4), in place."""

from __future__ import annotations

import torch

__all__ = ["norm_rows"]


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Shapes and casts as in the contract (`quire.ops.norm.norm_rows`)."""
    wide = x.float()
    wide *= torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    x.copy_(wide * weight.float())
