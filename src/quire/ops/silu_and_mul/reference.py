"""The gate of a SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202, equation 6)."""

from __future__ import annotations

import torch

__all__ = ["silu_and_mul"]


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.silu_and_mul`)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
