"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, equation 34)."""

from __future__ import annotations

import torch

__all__ = ["rope"]


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """Shapes as in the contract (`quire.ops.rope`)."""
    cos_t, sin_t = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, R/2]
    for x in (q, k):
        _rotate(x, cos_t, sin_t, interleaved)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    half = cos.shape[-1]
    rotated = x[..., : 2 * half]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    a, b = first.float(), second.float()  # views of x when x is float32
    turned_first, turned_second = a * cos - b * sin, b * cos + a * sin
    first.copy_(turned_first)
    second.copy_(turned_second)
