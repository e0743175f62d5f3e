"""Decode and prefill shapes, odd sizes, rows of zeros and rows that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["int8_weight", "make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`; arguments are x, weight, scale, bias, ids."""
    ids = torch.tensor([0, 40, 7, 7])
    for dtype in DTYPES:
        for outputs, depth in ((48, 64), (41, 37), (300, 1030)):
            weight, scale = int8_weight(generator, outputs, depth)
            bias = normal(generator, outputs, dtype=dtype)
            for rows in (1, 5, 33):
                x = normal(generator, rows, depth, dtype=dtype)
                label = f"{dtype}, {rows} rows, {depth} to {outputs}"
                yield Case(label=label, args=(x, weight, scale, None, ids))
                yield Case(label=f"{label}, bias", args=(x, weight, scale, bias, ids))
        weight, scale = int8_weight(generator, 41, 37)
        wide = normal(generator, 6, 70, dtype=dtype)
        wide[1], wide[2, 20], wide[4, 9] = 0.0, float("nan"), float("inf")
        yield Case(
            label=f"{dtype}, slices, zeros, NaN and infinity",
            args=(wide[:, 3:40], weight, scale, None, ids),
        )
    weight, scale = int8_weight(generator, 100, 64)
    for rows in (1, 5, 33):
        args = (normal(generator, rows, 64), weight, scale, normal(generator, 100), ids)
        yield Case(label=f"{rows} rows, gated", args=args, kwargs={"gate": "silu"})
        yield Case(
            label=f"{rows} rows, gated, rotated", args=args, kwargs={"gate": "silu", "rotation": 32}
        )
    for dtype in DTYPES:
        for rotation, depth in ((16, 48), (64, 192), (256, 512), (512, 1536)):
            weight, scale = int8_weight(generator, 41, depth)
            for rows in (1, 6, 33):
                x = normal(generator, rows, depth + 3, dtype=dtype)[:, 1:-2]
                x[0, 5], x[-1, 3] = 100.0, -1000.0  # as outliers of models
                label = f"{dtype}, {rows} rows, {depth} to 41, rotated by {rotation}"
                yield Case(label, (x, weight, scale, None, ids), {"rotation": rotation})


def int8_weight(
    generator: torch.Generator, outputs: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight int8 [outputs, depth] over its whole range and scales float32 [outputs], for
    outputs about as large as inputs."""
    weight = torch.randint(-128, 128, (outputs, depth), generator=generator, dtype=torch.int8)
    scale = (0.5 + torch.rand(outputs, generator=generator)) / (73 * depth**0.5)
    return weight, scale
