"""Rows of activations in 8 bits, as every integer linear layer takes them."""

from __future__ import annotations

import torch

__all__ = ["LARGEST", "SMALLEST", "quantize_rows"]

LARGEST = 127
"""Of the integers; -128 is not used, so that the range is symmetric."""

SMALLEST = 1e-30
"""A row whose largest magnitude is below this counts as zeros: 127 / it would overflow."""


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, I] of any float dtype → integers [T, I] held in float32, scale [T, 1] float32, so that
    x ≈ integers · scale: one scale per row, largest magnitude / 127, rounded to nearest even.

    A row with NaN or infinity gets zeros and the scale NaN, so that its products are NaN.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    finite = largest.isfinite()
    usable = finite & (largest >= SMALLEST)
    divisor = torch.where(usable, largest, 1.0)
    quantized = torch.round(x * torch.div(torch.full_like(divisor, LARGEST), divisor))
    scale = torch.where(usable, largest / LARGEST, torch.where(finite, 0.0, torch.nan))
    return torch.where(usable, quantized, 0.0), scale
