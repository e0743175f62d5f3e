"""LayerNorm (Ba, Kiros & Hinton 2016, arXiv:1607.06450, equation 3)."""

from __future__ import annotations

import torch

__all__ = ["add_layer_norm", "layer_norm"]


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.norm.layer_norm`)."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as in the contract (`quire.ops.norm.layer_norm`)."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total
