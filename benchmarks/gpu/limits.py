"""Attainable bandwidth and arithmetic, never measured on zeros."""

from __future__ import annotations

import torch

from benchmarks.gpu.part import Part

__all__ = ["run"]


def run(part: Part) -> None:
    """A copy, read and written, and square products; on a CPU of toy sizes."""
    elements, size = (2**16, 64) if part.is_dry else (2**29, 8192)
    source = torch.randn(elements, device=part.device)
    target = torch.empty_like(source)
    seconds = part.seconds_of(lambda: target.copy_(source), 400)
    part.rate("copy of 2 GiB, read and written", "GB/s", 2.0 * source.nbytes, seconds)
    a, b = torch.randn(2, size, size, device=part.device).bfloat16()
    seconds = part.seconds_of(lambda: torch.mm(a, b), 400)
    part.rate("bfloat16 product of 8192³", "GFLOP/s", 2.0 * size**3, seconds)
