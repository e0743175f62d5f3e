"""Gates of many widths, very large and very small values among them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.activation.contract import NAMES
from quire.ops.inputs import DTYPES, normal
from quire.ops.operation import Case

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for dtype in DTYPES:
        for kind in NAMES:
            for rows, width in ((1, 3072), (7, 36), (2, 5)):
                x = normal(generator, rows, 2 * width, dtype=dtype)
                x[:, :width:3] *= 30  # exp overflows and underflows
                yield Case(label=f"{dtype}, {kind}, {rows} rows of {width}", args=(x, kind))
