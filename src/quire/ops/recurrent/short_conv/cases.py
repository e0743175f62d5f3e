"""One token and many, fresh rows and rows that go on, odd widths, with and without a bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal
from quire.ops.recurrent.random_states import random_rows

__all__ = ["make_inputs"]


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
            ([1, 5, 3], 130, 4, True, False),
        ):
            rows = random_rows(generator, counts, (taps - 1) * size, dtype, padding=3)
            kind = f"{taps} taps, bias {has_bias}, gated {gated}"
            yield Case(
                label=f"{dtype}, {counts} tokens of {size}, {kind}",
                args=(
                    normal(generator, sum(counts), 3 * size, dtype=dtype)[
                        :, : 3 * size if gated else size
                    ],
                    normal(generator, taps, size, dtype=dtype),
                    normal(generator, size, dtype=dtype) if has_bias else None,
                    *rows,
                    gated,
                ),
            )
