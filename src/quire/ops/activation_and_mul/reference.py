"""An activation of the first half times the second half."""

from __future__ import annotations

import torch

from quire.ops.activation.reference import activation

__all__ = ["activation_and_mul"]


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.activation_and_mul`)."""
    gate, up = x.float().chunk(2, dim=-1)
    return (activation(gate, kind) * up).to(x.dtype)
