"""Rows of odd sizes and of many pieces, slices among them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for rows, width in ((1, 768), (3, 37), (5, 5000)):
            x, y = normal(generator, 2, rows, width + 3, dtype=dtype)
            yield Case(
                label=f"{dtype}, {rows} rows of {width}", args=(x[:, :width], y[:, 3:] * 100)
            )
