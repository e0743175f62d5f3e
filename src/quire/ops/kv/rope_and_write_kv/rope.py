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
) -> None:
    """Rotate q [T, H, D] and k [T, K, D] in place.

    positions: [T]. cos, sin: float32 [P, R/2] by position; R ≤ D is the rotary size, dims R … D - 1
    stay. Dim i is paired with i + R/2. Computed in float32, rounded once.
    """
    cos_t, sin_t = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, R/2]
    for x in (q, k):
        _rotate(x, cos_t, sin_t)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    a, b = first.float(), second.float()  # views of x when x is float32
    turned_first, turned_second = a * cos - b * sin, b * cos + a * sin
    first.copy_(turned_first)
    second.copy_(turned_second)
