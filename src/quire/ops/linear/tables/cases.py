"""Shared and per-output tables of all sizes, one block and several, with added numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.config.packed.table_format import TABLE_BITS
from quire.ops.linear.tables.contract import Added, Tables
from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs", "table_weight"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`; arguments are x, weight, bias, ids."""
    ids = torch.tensor([0, 40, 7, 7])
    for bits in TABLE_BITS:
        for own in (False, True):
            for (outputs, blocks, size), dtype in zip(
                ((41, 1, 36), (70, 3, 64), (300, 2, 20)), DTYPES, strict=True
            ):
                weight = table_weight(generator, bits, outputs, blocks, size, own=own)
                for rows in (1, 5, 50):
                    x = normal(generator, rows, blocks * size, dtype=dtype)
                    bias = normal(generator, outputs, dtype=dtype) if blocks > 1 else None
                    label = f"{bits} bits, {dtype}, {rows} rows, {blocks * size} to {outputs}"
                    yield Case(label=label, args=(x, weight, bias, ids))
    weight = table_weight(generator, 4, 41, 2, 32, own=False)
    wide = normal(generator, 6, 70)
    wide[1], wide[2, 20], wide[4, 9] = 0.0, float("nan"), float("inf")
    gated = table_weight(generator, 4, 200, 2, 32, own=True)
    for rows in (1, 5, 50):
        args = (normal(generator, rows, 64), gated, normal(generator, 200), ids)
        yield Case(label=f"{rows} rows, gated", args=args, kwargs={"gate": "silu"})
    yield Case(label="slices, zeros, NaN and infinity", args=(wide[:, 3:67], weight, None, ids))


def table_weight(
    generator: torch.Generator, bits: int, outputs: int, blocks: int, block_size: int, *, own: bool
) -> Tables:
    """Return random codes and entries, and some added numbers, two of them at one weight. own: each
    output has its own table."""
    inputs = blocks * block_size
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    table = normal(generator, outputs if own else 1, 1 << bits)
    scale = normal(generator, outputs, blocks) / inputs**0.5
    rows = torch.randint(outputs, (outputs,), generator=generator)
    columns = torch.randint(inputs, (outputs,), generator=generator)
    rows[1], columns[1] = rows[0], columns[0]
    return Tables(codes, table, scale, Added(rows, columns, normal(generator, outputs)))
