"""Decode and prefill shapes, with and without bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.inputs import DTYPES, normal
from quire.ops.operation import Case

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for dtype in DTYPES:
        weight = normal(generator, 48, 64, dtype=dtype) / 8
        for rows in (1, 5, 33):
            x = normal(generator, rows, 64, dtype=dtype)
            yield Case(label=f"{dtype}, {rows} rows", args=(x, weight))
            bias = normal(generator, 48, dtype=dtype)
            yield Case(label=f"{dtype}, {rows} rows, bias", args=(x, weight, bias))
