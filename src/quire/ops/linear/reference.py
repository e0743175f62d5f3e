"""y = x Wᵀ + b."""

from __future__ import annotations

import torch

__all__ = ["linear"]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.linear`)."""
    return torch.nn.functional.linear(x, weight, bias)
