"""Adapters of mixed ranks in mixed rows, odd sizes, merged projections, rows without an adapter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.linear.low_rank.tables import LowRankTables
from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]

SHAPES = ((64, (32,), 8), (37, (5, 3), 3), (128, (96, 32, 32), 16), (16, (1100,), 1))
"""Inputs, outputs of each part, and the largest rank."""


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for inputs, parts, max_rank in SHAPES:
            tables = LowRankTables(3, max_rank, inputs, parts, dtype, torch.device("cpu"))
            for slot, rank in ((0, max_rank), (2, max(1, max_rank // 2))):
                for part, size in enumerate(parts):
                    if (slot + part) % 3 == 1:
                        continue  # an adapter that does not change this part
                    a = normal(generator, rank, inputs, dtype=dtype)
                    b = normal(generator, size, rank, dtype=dtype) * 0.2
                    tables.put(slot, part, a, b, 0.5 + slot)
            for rows in (1, 9):
                x = normal(generator, rows, inputs, dtype=dtype)
                y = normal(generator, rows, sum(parts), dtype=dtype)
                slots = torch.randint(4, (rows,), generator=generator)
                slots[0] = 3
                label = f"{dtype}, {rows} rows, {inputs} to {parts}"
                yield Case(label=label, args=(y, x, slots, tables))
            wide = normal(generator, 4, sum(parts) + 8, dtype=dtype)
            args = (wide[:, 4:-4], x[:4], torch.tensor([0, 1, 0, 3]), tables)
            yield Case(label=f"{dtype}, rows of a wider tensor", args=args)
