"""One token and many, fresh rows and rows that go on, shared key heads, slow and fast decay."""

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
        for counts, keys, (num_heads, value_dim), rate in (
            ([1], (2, 128), (4, 128), 0.1),
            ([1, 1, 1], (1, 12), (3, 16), 4.0),
            ([1, 7, 2], (2, 64), (2, 48), 0.1),
            ([40, 1], (3, 8), (6, 32), 0.02),
            ([17], (1, 256), (2, 64), 0.1),
        ):
            size = num_heads * keys[1] * value_dim
            rows = random_rows(generator, counts, size, torch.float32, padding=16)
            width = 2 * keys[0] * keys[1] + num_heads * value_dim
            gates = normal(generator, sum(counts), 2 * num_heads + 3, dtype=dtype)
            log_rates = normal(generator, num_heads, dtype=torch.float32) + torch.tensor(rate).log()
            yield Case(
                label=f"{dtype}, {counts} tokens, keys {keys}, values {(num_heads, value_dim)}",
                args=(
                    normal(generator, sum(counts), width, dtype=dtype),
                    gates[:, : 2 * num_heads],
                    log_rates,
                    normal(generator, num_heads, dtype=torch.float32),
                    *rows,
                    keys,
                    counts[0] > 1,
                ),
            )
