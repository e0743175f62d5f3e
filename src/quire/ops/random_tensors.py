"""Building blocks of the operations' input generators."""

from __future__ import annotations

import torch

__all__ = ["DTYPES", "normal"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return standard normal numbers on the generator's device."""
    sample = torch.randn(shape, generator=generator, device=generator.device)
    return sample.to(dtype)
