"""Every kind, in blocks of one group and of several, with odd sizes and rows that are not
finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.config.packed.block_kinds import BLOCK_KINDS, BlockKind
from quire.ops.linear.blocks.contract import Blocks
from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["block_weight", "make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`; arguments are x, weight, bias, ids."""
    ids = torch.tensor([0, 40, 7, 7])
    for kind in BLOCK_KINDS.values():
        for outputs, num_blocks, groups in ((41, 3, 1), (70, 2, 8)):
            weight = block_weight(generator, kind, outputs, num_blocks, groups)
            depth = weight.codes.shape[1]
            for rows, dtype in ((1, torch.bfloat16), (5, torch.float32), (50, torch.float16)):
                x = normal(generator, rows, depth, dtype=dtype)
                bias = normal(generator, outputs, dtype=dtype) if groups > 1 else None
                label = f"{kind.name}, {dtype}, {rows} rows, {depth} to {outputs}"
                yield Case(label=label, args=(x, weight, bias, ids))
    for dtype in DTYPES:
        weight = block_weight(generator, BLOCK_KINDS["w4_k"], 41, 2, 1)
        wide = normal(generator, 6, 70, dtype=dtype)
        wide[1], wide[2, 20], wide[4, 9] = 0.0, float("nan"), float("inf")
        yield Case(
            label=f"{dtype}, slices, zeros, NaN and infinity",
            args=(wide[:, 3:67], weight, None, ids),
        )
    weight = block_weight(generator, BLOCK_KINDS["w6_k"], 100, 1, 4)
    for rows in (1, 5, 50):
        args = (normal(generator, rows, 64), weight, normal(generator, 100), ids)
        yield Case(label=f"{rows} rows, gated", args=args, kwargs={"gate": "silu"})


def block_weight(
    generator: torch.Generator, kind: BlockKind, outputs: int, num_blocks: int, groups: int
) -> Blocks:
    """All codes of the kind, in blocks of `groups` groups, with scales of both signs in float16, so
    that outputs are about as large as inputs."""
    by_block, by_group = (outputs, num_blocks), (outputs, num_blocks * groups)
    depth = num_blocks * groups * kind.group_size

    def integers(low: int, high: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    minima, zeros = kind.offset == "minimum", kind.offset == "zero"
    size = depth**-0.5 / 2**kind.bits / (32 if kind.factors else 1)
    if kind.levels is not None:
        size *= 16 / max(kind.levels)
    scale = (normal(generator, *by_block) * size).half().float()
    minimum = (normal(generator, *by_block) * size).half().float() if minima else None
    lows = None
    if zeros:
        lows = integers(-2, 1 << min(kind.bits, 7), by_block, torch.int8)
    elif minima and kind.factors:
        lows = integers(0, 64, by_group, torch.uint8)
    return Blocks(
        kind,
        integers(0, 1 << kind.bits, (outputs, depth), torch.uint8),
        scale,
        minimum,
        integers(-128, 128, by_group, torch.int8) if kind.factors else None,
        lows,
    )
