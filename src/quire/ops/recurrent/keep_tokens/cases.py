"""Rows that are kept beside rows that are not, of one token and of many, to any place."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for counts, keep, width in (
            ([1], [-1, -1, -1, -1, -1], 8),
            ([3], [0, 4, 1, 6, 2], 5),
            ([1, 4, 2], [-1, 5, 0, -1, -1], 33),
            ([40, 2, 3, 1, 5], [1, -1, -1, 9, -1], 96),
        ):
            starts = torch.tensor([0, *counts]).cumsum(0).int()
            slots = torch.tensor([3, 1, 2, 4, 0])[: len(counts)]
            x = normal(generator, int(starts[-1]), width + 3, dtype=dtype)
            kept = normal(generator, 50, width + 7, dtype=dtype)
            yield Case(
                label=f"{dtype}, {counts} tokens of {width}, kept at {keep}",
                args=(x[:, :width], kept[:, 2 : width + 2], slots, starts, torch.tensor(keep)),
            )
