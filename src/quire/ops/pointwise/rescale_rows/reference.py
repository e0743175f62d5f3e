"""Reference of `rescale_rows`: x[t] · factors[index[t]], with cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs", "rescale_rows"]


def rescale_rows(
    x: torch.Tensor, factors: torch.Tensor, index: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute it by torch; contract in `quire.ops.pointwise.rescale_rows`."""
    if index is None:
        return x.mul_(factors[0])
    return x.mul_(factors[index].view(-1, *(1,) * (x.dim() - 1)))


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Heads of odd sizes as a part of wider rows, no row, one of many pieces, both types of
    numbers."""
    for dtype in DTYPES:
        for rows, heads, width in ((1, 6, 128), (3, 1, 37), (5, 40, 129), (0, 2, 8)):
            x = normal(generator, rows, heads + 1, width, dtype=dtype)[:, :heads]
            factors = normal(generator, 11, dtype=dtype)
            index = torch.randint(0, 11, (rows,), generator=generator)
            if heads == 1:
                x, index = x[:, 0], index.int()
            yield Case(label=f"{dtype}, {rows} × {heads} × {width}", args=(x, factors, index))
        x = normal(generator, 7, 130, dtype=dtype)
        yield Case(label=f"{dtype}, one factor", args=(x, factors[:1]))
