"""Every activation on values of all magnitudes, in odd shapes, and on a view with strides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.pointwise.activation.contract import GATES, NAMES
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs", "make_gates"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for kind in NAMES:
            for rows, width in ((3, 37), (1, 5000)):
                x = normal(generator, rows, width, dtype=dtype)
                x[:, ::3] *= 30  # exp overflows and underflows
                x[0, 1] = float("nan")
                yield Case(label=f"{dtype}, {kind}, {rows} rows of {width}", args=(x, kind))
        x = normal(generator, 4, 60, dtype=dtype)[:, 7:40]
        yield Case(label=f"{dtype}, slices", args=(x, "gelu"))


def make_gates(generator: torch.Generator) -> Iterator[Case]:
    """Gates of many widths, very large and very small values among them."""
    for dtype in DTYPES:
        for kind in GATES:
            for rows, width in ((1, 3072), (7, 36), (2, 5)):
                x = normal(generator, rows, 2 * width, dtype=dtype)
                x[:, :width:3] *= 30  # exp overflows and underflows
                yield Case(label=f"{dtype}, {kind}, {rows} rows of {width}", args=(x, kind))
