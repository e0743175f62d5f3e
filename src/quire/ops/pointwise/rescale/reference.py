"""Reference of `rescale`: x · factor, and cap · tanh(x · factor / cap), with cases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs", "rescale"]


def rescale(x: torch.Tensor, factor: float, cap: float | None = None) -> torch.Tensor:
    """Compute it by torch; contract in `quire.ops.pointwise.rescale`."""
    if cap is None:
        return x.mul_(factor)
    return x.copy_((x.float() * (factor / cap)).tanh_() * cap)


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Rows of odd sizes, with strides and of many pieces; values near zero and far above the cap;
    NaN and infinities."""
    for dtype in DTYPES:
        for rows, width in ((1, 768), (3, 37), (5, 5000)):
            for factor, cap in ((0.088388, None), (1.0, 30.0), (0.0625, 2.0)):
                x = normal(generator, rows, width + 3, dtype=dtype)[:, 3:] * 100
                yield Case(label=f"{dtype}, {rows} × {width}, {cap}", args=(x, factor, cap))
        x = normal(generator, 2, 3, 11, dtype=dtype) * 1e-3
        x[0, 0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
        yield Case(label=f"{dtype}, small values", args=(x, 1.0, 30.0))
