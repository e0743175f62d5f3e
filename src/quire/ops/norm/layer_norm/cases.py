"""Rows of many widths with and without weight and bias, strided and far from zero among them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs", "make_inputs_with_residual"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for rows, width in ((1, 1024), (5, 48), (3, 257), (2, 5)):
            x = normal(generator, rows, width + 3, dtype=dtype)[:, :width]
            weight, bias = normal(generator, 2, width, dtype=dtype)
            label = f"{dtype}, {rows} rows of {width}"
            yield Case(label=f"{label}, weight and bias", args=(x, weight, bias, 1e-5))
            yield Case(label=f"{label}, weight", args=(x, weight, None, 1e-5))
            yield Case(label=f"{label}, plain", args=(x, None, None, 1e-5))
            yield Case(label=f"{label} far from zero", args=(x + 8, None, bias, 1e-5))
    heads = normal(generator, 4, 6, 32)[:, 1:4]
    yield Case(label="three dimensions", args=(heads, None, None, 1e-5))


def make_inputs_with_residual(generator: torch.Generator) -> Iterator[Case]:
    """The rows of `layer_norm`, each with a residual of other strides."""
    for case in make_inputs(generator):
        x, *rest = case.args
        residual = normal(generator, *x.shape, dtype=x.dtype)
        yield Case(label=case.label, args=(x, residual, *rest))
