"""Rows of many widths, strided and tiny-valued ones among them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs", "make_inputs_with_residual"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for rows, width in ((1, 1024), (5, 40), (3, 257)):
            wide = normal(generator, rows, width + 3, dtype=dtype)
            weight = normal(generator, width, dtype=dtype)
            yield Case(
                label=f"{dtype}, {rows} rows of {width}",
                args=(wide[:, :width], weight, 1e-6),
            )
    heads = normal(generator, 4, 6, 32)
    weight = normal(generator, 32)
    yield Case(
        label="heads of a merged projection",
        args=(heads[:, :4], weight, 1e-6),
    )


def make_inputs_with_residual(generator: torch.Generator) -> Iterator[Case]:
    """The rows of `rms_norm`, each with a residual of other strides or of its own."""
    for case in make_inputs(generator):
        x, *rest = case.args
        residual = normal(generator, *x.shape, dtype=x.dtype)
        yield Case(label=case.label, args=(x, residual, *rest))
    heads = normal(generator, 4, 6, 32)
    weight = normal(generator, 32)
    yield Case(
        label="both are heads of a merged projection",
        args=(heads[:, :4], heads[:, 2:], weight, 1e-6),
    )
