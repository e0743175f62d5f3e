"""One token and many, fresh rows and rows that go on, odd widths, with and without a bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

__all__ = ["make_inputs"]

NUM_SLOTS = 5


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for counts, size, taps, has_bias, gated in (
            ([1], 64, 3, False, True),
            ([1, 1, 1], 2048, 3, False, True),
            ([1, 7, 2], 129, 4, True, True),
            ([40, 1], 1000, 3, True, True),
            ([3], 5, 2, False, True),
            ([1, 33, 1], 1056, 4, False, False),
            ([2], 7, 3, True, False),
        ):
            starts = torch.tensor([0, *counts]).cumsum(0).int()
            slots = torch.randperm(NUM_SLOTS, generator=generator)[: len(counts)]
            states = normal(generator, 2 * NUM_SLOTS, (taps - 1) * size + 3, dtype=dtype)
            read = torch.arange(NUM_SLOTS)
            read[1], write = NUM_SLOTS + 1, read + NUM_SLOTS
            write[1] = 1
            num_computed = torch.tensor([0, 3, 9, 0, 1])
            states[read[num_computed == 0]] = torch.nan  # as another tenant may have left it
            kind = f"{taps} taps, bias {has_bias}, gated {gated}"
            yield Case(
                label=f"{dtype}, {counts} tokens of {size}, {kind}",
                args=(
                    normal(generator, int(starts[-1]), 3 * size, dtype=dtype)[
                        :, : 3 * size if gated else size
                    ],
                    normal(generator, taps, size, dtype=dtype),
                    normal(generator, size, dtype=dtype) if has_bias else None,
                    states[:, : (taps - 1) * size],
                    read,
                    write,
                    slots,
                    starts,
                    num_computed,
                    gated,
                ),
            )
