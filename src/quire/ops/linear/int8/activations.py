"""Rows of activations in 8 bits, the input of every integer linear layer."""

from __future__ import annotations

import torch

__all__ = ["LARGEST", "SMALLEST", "largest_magnitudes", "quantize_rows", "scales_of_rows"]

LARGEST = 127
"""Largest integer; -128 is not used, so the range is symmetric."""

SMALLEST = 1e-30
"""Rows whose largest magnitude is below this count as zeros, since 127 / it would overflow."""


def largest_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row of x [T, I], float32 [T, 1]; NaN if the row has one."""
    return x.float().abs().amax(dim=-1, keepdim=True)


def scales_of_rows(largest: torch.Tensor) -> torch.Tensor:
    """Return the scales of rows with these largest magnitudes, both float32 [T, 1]: 0 for rows that
    count as zeros, NaN for rows that are not finite."""
    finite = largest.isfinite()
    usable = finite & (largest >= SMALLEST)
    return torch.where(usable, largest / LARGEST, torch.where(finite, 0.0, torch.nan))


def quantize_rows(
    x: torch.Tensor, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [T, I] of any float dtype → integers [T, I] held in float32, scale [T, 1] float32,
    with x ≈ integers · scale. The scale of a row is its largest magnitude / 127; integers are
    rounded to nearest even.

    A row with NaN or infinity gets zeros and the scale NaN, so its products are NaN. largest:
    float32 [T, 1], largest magnitudes of whole rows if x is only a part of them.
    """
    if largest is None:
        largest = largest_magnitudes(x)
    x = x.float()
    usable = largest.isfinite() & (largest >= SMALLEST)
    divisor = torch.where(usable, largest, 1.0)
    quantized = torch.round(x * torch.div(torch.full_like(divisor, LARGEST), divisor))
    return torch.where(usable, quantized, 0.0), scales_of_rows(largest)
