"""Residual addition followed by LayerNorm."""

from __future__ import annotations

import torch

from quire.ops.layer_norm.reference import layer_norm

__all__ = ["add_layer_norm"]


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as in the contract (`quire.ops.add_layer_norm`)."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total
