"""Rows of many widths within wider ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for dtype in DTYPES:
        for rows, width in ((1, 2048), (5, 40), (3, 257), (40, 512)):
            wide = normal(generator, rows, 2 * width + 3, dtype=dtype)
            weight = normal(generator, width, dtype=dtype)
            yield Case(
                label=f"{dtype}, {rows} rows of {width}",
                args=(wide[:, 3 : 3 + width], weight, 1e-6),
            )
