"""Decode and prefill shapes, odd sizes, with and without bias, and other rows than weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`; arguments are x, weight, bias, ids."""
    ids = torch.tensor([0, 40, 7, 7])
    for dtype in DTYPES:
        for outputs, depth in ((48, 64), (41, 37), (300, 130)):
            weight = normal(generator, outputs, depth, dtype=dtype) / depth**0.5
            bias = normal(generator, outputs, dtype=dtype)
            for rows in (1, 5, 33):
                x = normal(generator, rows, depth, dtype=dtype)
                label = f"{dtype}, {rows} rows, {depth} to {outputs}"
                yield Case(label=label, args=(x, weight, None, ids))
                yield Case(label=f"{label}, bias", args=(x, weight, bias, ids))
        wide = normal(generator, 4, 70)
        label = f"float32 slices over {dtype} weights"
        yield Case(label=label, args=(wide[:, 3:40], weight[:, :37], bias, ids))
    weight, bias = normal(generator, 100, 64) / 8, normal(generator, 100)
    for rows in (1, 5, 33):
        args = (normal(generator, rows, 64), weight, bias, ids)
        yield Case(label=f"{rows} rows, gated", args=args, kwargs={"gate": "silu"})
