"""Rows with and without weight and bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.inputs import DTYPES, normal
from quire.ops.operation import Case

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for dtype in DTYPES:
        x = normal(generator, 5, 48, dtype=dtype)
        weight, bias = normal(generator, 2, 48, dtype=dtype)
        yield Case(label=f"{dtype}, weight and bias", args=(x, weight, bias, 1e-5))
        yield Case(label=f"{dtype}, weight", args=(x, weight, None, 1e-5))
        yield Case(label=f"{dtype}, plain", args=(x, None, None, 1e-5))
