"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467, equation 4)."""

from __future__ import annotations

import torch

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Shapes and casts as in the contract (`quire.ops.norm.rms_norm`)."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as in the contract (`quire.ops.norm.rms_norm`)."""
    total = x + residual
    return rms_norm(total, weight, eps), total
