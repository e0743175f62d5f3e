"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467, equation 4), in place, and its cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs", "norm_rows"]


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Shapes and casts as in the contract (`quire.ops.norm.norm_rows`)."""
    wide = x.float()
    wide *= torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    x.copy_(wide * weight.float())


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Rows of many widths within wider ones."""
    for dtype in DTYPES:
        for rows, width in ((1, 2048), (5, 40), (3, 257), (40, 512)):
            wide = normal(generator, rows, 2 * width + 3, dtype=dtype)
            weight = normal(generator, width, dtype=dtype)
            yield Case(
                label=f"{dtype}, {rows} rows of {width}",
                args=(wide[:, 3 : 3 + width], weight, 1e-6),
            )
