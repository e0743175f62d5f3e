"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467, equation 4)."""

from __future__ import annotations

import torch

__all__ = ["rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Shapes and casts as in the contract (`quire.ops.rms_norm`)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
