"""Reference of `activation_times`: activation(x) · up, with cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.pointwise.activation.contract import FACTORS, resolve_factor
from quire.ops.pointwise.activation.reference import activation
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["activation_times", "make_inputs"]


def activation_times(x: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute it by torch; contract in `quire.ops.pointwise.activation_times`."""
    wide = x.float()
    is_sigmoid = resolve_factor(kind) == "sigmoid"
    factor = torch.sigmoid(wide) if is_sigmoid else activation(wide, kind)
    return (factor * up.float()).to(x.dtype)


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Parts of wider rows, odd sizes, and more than a task takes."""
    for dtype in DTYPES:
        for kind in FACTORS:
            for rows, width in ((1, 256), (3, 37), (2, 5000)):
                x = normal(generator, rows, width, dtype=dtype)
                up = normal(generator, rows, 3 * width, dtype=dtype)[:, width : 2 * width]
                yield Case(label=f"{dtype}, {kind}, {rows} × {width}", args=(x, up, kind))
