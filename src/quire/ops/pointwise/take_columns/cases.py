"""Permutations of odd sizes, columns that are repeated or left out, rows with a stride."""

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
            x = normal(generator, rows, width + 3, dtype=dtype)[:, 3:]
            order = torch.randperm(width, generator=generator)
            yield Case(label=f"{dtype}, {rows} rows of {width}", args=(x, order))
        x = normal(generator, 2, 3, 11, dtype=dtype)
        some = torch.tensor([10, 0, 0, 4])
        yield Case(label=f"{dtype}, some columns", args=(x, some))
