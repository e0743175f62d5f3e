"""Group sizes with and without zero points, odd sizes, rows that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.linear.int4.contract import GROUP_SIZES
from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["int4_weight", "make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`; arguments are x, weight, scale, zero, bias, ids."""
    ids = torch.tensor([0, 40, 7, 7])
    for dtype in DTYPES:
        for group_size in GROUP_SIZES if dtype == torch.float32 else GROUP_SIZES[:1]:
            for outputs, num_groups in ((48, 1), (41, 3), (300, 8)):
                depth = num_groups * group_size
                weight, scale, zero = int4_weight(generator, outputs, depth, group_size)
                bias = normal(generator, outputs, dtype=dtype)
                for rows in (1, 5, 50):
                    x = normal(generator, rows, depth, dtype=dtype)
                    label = f"{dtype}, {rows} rows, {depth} to {outputs} by {group_size}"
                    yield Case(label=label, args=(x, weight, scale, None, None, ids))
                    yield Case(
                        label=f"{label}, zero points, bias",
                        args=(x, weight, scale, zero, bias, ids),
                    )
        weight, scale, zero = int4_weight(generator, 41, 64, 32)
        wide = normal(generator, 6, 70, dtype=dtype)
        wide[1], wide[2, 20], wide[4, 9] = 0.0, float("nan"), float("inf")
        yield Case(
            label=f"{dtype}, slices, zeros, NaN and infinity",
            args=(wide[:, 3:67], weight, scale, zero, None, ids),
        )
    weight, scale, zero = int4_weight(generator, 100, 64, 32)
    for rows in (1, 5, 50):
        args = (normal(generator, rows, 64), weight, scale, zero, normal(generator, 100), ids)
        yield Case(label=f"{rows} rows, gated", args=args, kwargs={"gate": "silu"})
        yield Case(
            label=f"{rows} rows, gated, rotated", args=args, kwargs={"gate": "silu", "rotation": 16}
        )
    for dtype in DTYPES:
        for rotation, depth, group_size in ((16, 96, 32), (64, 192, 64), (256, 512, 128)):
            weight, scale, zero = int4_weight(generator, 41, depth, group_size)
            for rows in (1, 6, 33):
                x = normal(generator, rows, depth + 3, dtype=dtype)[:, 1:-2]
                x[0, 5], x[-1, 3] = 100.0, -1000.0  # as outliers of models
                label = f"{dtype}, {rows} rows, {depth} to 41, rotated by {rotation}"
                yield Case(label, (x, weight, scale, zero, None, ids), {"rotation": rotation})


def int4_weight(
    generator: torch.Generator, outputs: int, depth: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight uint8 [outputs, depth] with all 16 values, and scales float32 and zero points
    uint8 [outputs, depth / group_size], for outputs about as large as inputs."""
    groups = (outputs, depth // group_size)
    weight = torch.randint(0, 16, (outputs, depth), generator=generator, dtype=torch.uint8)
    scale = (0.5 + torch.rand(groups, generator=generator)) / (5 * depth**0.5)
    zero = torch.randint(0, 16, groups, generator=generator, dtype=torch.uint8)
    return weight, scale, zero
