"""Rows of activations in 8 bits, as every integer linear layer takes them."""

from __future__ import annotations

import torch

__all__ = ["LARGEST", "SMALLEST", "largest_magnitudes", "quantize_rows", "scales_of_rows"]

LARGEST = 127
"""Largest of the integers; -128 is not used, so that the range is symmetric."""

SMALLEST = 1e-30
"""A row whose largest magnitude is below this counts as zeros: 127 / it would overflow."""


def largest_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] → float32 [T, 1]; NaN if a number of the row is."""
    return x.float().abs().amax(dim=-1, keepdim=True)


def scales_of_rows(largest: torch.Tensor) -> torch.Tensor:
    """Scales of rows by their largest magnitudes, both float32 [T, 1]: 0 where these count as
    zeros, NaN where they are not finite."""
    finite = largest.isfinite()
    usable = finite & (largest >= SMALLEST)
    return torch.where(usable, largest / LARGEST, torch.where(finite, 0.0, torch.nan))


def quantize_rows(
    x: torch.Tensor, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, I] of any float dtype → integers [T, I] held in float32, scale [T, 1] float32, so that
    x ≈ integers · scale: one scale per row, largest magnitude / 127, rounded to nearest even.

    A row with NaN or infinity gets zeros and the scale NaN, so that its products are NaN. largest:
    float32 [T, 1], magnitudes to take the scales from where x is only part of the rows.
    """
    if largest is None:
        largest = largest_magnitudes(x)
    x = x.float()
    usable = largest.isfinite() & (largest >= SMALLEST)
    divisor = torch.where(usable, largest, 1.0)
    quantized = torch.round(x * torch.div(torch.full_like(divisor, LARGEST), divisor))
    return torch.where(usable, quantized, 0.0), scales_of_rows(largest)
