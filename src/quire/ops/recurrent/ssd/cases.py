"""One token and many, fresh rows and rows that go on, shared groups, slow and fast decay, bounded
steps."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import torch

from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal
from quire.ops.recurrent.random_states import random_rows

__all__ = ["make_inputs"]


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for dtype in DTYPES:
        for counts, groups, (num_heads, head_dim), rate, limits in (
            ([1], (1, 128), (4, 64), 0.1, (0.0, inf)),
            ([1, 1, 1], (3, 12), (3, 16), 4.0, (0.0, inf)),
            ([1, 7, 2], (2, 64), (6, 48), 0.1, (0.5, 0.9)),
            ([40, 1], (2, 8), (4, 32), 0.02, (0.001, 2.0)),
            ([17], (1, 256), (2, 64), 0.1, (0.0, inf)),
        ):
            size = num_heads * groups[1] * head_dim
            rows = random_rows(generator, counts, size, torch.float32, padding=16)
            width = num_heads * head_dim + 2 * groups[0] * groups[1]
            steps = normal(generator, sum(counts), num_heads + 3, dtype=dtype)
            log_rates, bias, skip = (
                normal(generator, num_heads, dtype=torch.float32) for _ in range(3)
            )
            yield Case(
                label=f"{dtype}, {counts} tokens, groups {groups}, heads {(num_heads, head_dim)}",
                args=(
                    normal(generator, sum(counts), width, dtype=dtype),
                    steps[:, :num_heads],
                    log_rates + torch.tensor(rate).log(),
                    bias,
                    skip,
                    *rows,
                    groups,
                    limits,
                ),
            )
