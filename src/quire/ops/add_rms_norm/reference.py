"""Residual addition followed by RMSNorm."""

from __future__ import annotations

import torch

from quire.ops.rms_norm.reference import rms_norm

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as in the contract (`quire.ops.add_rms_norm`)."""
    total = x + residual
    return rms_norm(total, weight, eps), total
