"""Rotation of rows in blocks of neighbours, which spreads a large number over its block."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.base.errors import EngineError
from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["LEAST_ROTATION", "check_rotation", "make_inputs", "rotate", "rotation_part"]

LEAST_ROTATION = 16
"""Fewest numbers of a rotated block."""


def check_rotation(rotation: int, inputs: int) -> None:
    """Raise EngineError unless `rotation` is 1, or a power of two from `LEAST_ROTATION` on that
    divides the inputs."""
    is_power = rotation & (rotation - 1) == 0
    if rotation != 1 and (rotation < LEAST_ROTATION or not is_power or inputs % rotation):
        raise EngineError(
            f"{inputs} inputs cannot be rotated in blocks of {rotation}: a block has 1 of them, or "
            f"a power of two from {LEAST_ROTATION} on that divides them."
        )


def rotation_part(rotation: int) -> int:
    """Return the power of two by which rotated inputs are divided, and their weights multiplied,
    before both are rounded: the root of the block, or half of that. So they stay about as large as
    they were."""
    return 1 << (rotation.bit_length() - 1) // 2


def rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply each block of neighbours in x [..., I] by the Hadamard matrix H of Sylvester, whose
    numbers are 1 and -1: float32 [..., I]. A block of 1 leaves x as it is.

    H is symmetric and H · H = block · 1, so a second rotation gives block · x. Sums are made in
    float32 in this order: pairs 1 apart, pairs of these 2 apart, then 4, 8, … (fast Walsh–Hadamard
    transform). Spread over their block, large activations of a few inputs cost the others few of
    their 8 bits: QuaRot (Ashkboos et al., 2024, arXiv:2404.00456), section 3.
    """
    check_rotation(block, x.shape[-1])
    if block == 1:
        return x
    apart = x.float().reshape(-1, block).t().contiguous()  # neighbours at whole rows: fast
    distance = 1
    while distance < block:
        pairs = apart.view(block // distance // 2, 2, distance, apart.shape[1])
        first, second = pairs[:, 0], pairs[:, 1]
        sums = torch.empty_like(pairs)
        torch.add(first, second, out=sums[:, 0])
        torch.sub(first, second, out=sums[:, 1])
        apart = sums.view(block, apart.shape[1])
        distance *= 2
    return apart.t().reshape(x.shape)


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield blocks of less than a vector's two to more than registers hold, rows with a stride,
    outliers, a bad number, and no row."""
    for dtype in DTYPES:
        for block, inputs in ((1, 48), (16, 48), (32, 96), (64, 192), (256, 512), (1024, 2048)):
            for rows in (0, 1, 7):
                x = normal(generator, rows, inputs + 3, dtype=dtype)[:, 1:-2]
                if rows:
                    x[0, 5], x[-1, 3] = 100.0, -1000.0
                    x[rows // 2, 1] = float("inf") if rows > 1 else 0.0
                yield Case(label=f"{dtype}, {rows} rows of {inputs} by {block}", args=(x, block))
