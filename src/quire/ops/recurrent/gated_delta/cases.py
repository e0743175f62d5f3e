"""One token and many, fresh rows and rows that go on, shared key heads, slow and fast decay."""

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
        for counts, keys, (num_heads, value_dim), rate in (
            ([1], (2, 128), (4, 128), 0.1),
            ([1, 1, 1], (1, 12), (3, 16), 4.0),
            ([1, 7, 2], (2, 64), (2, 48), 0.1),
            ([40, 1], (3, 8), (6, 32), 0.02),
            ([17], (1, 256), (2, 64), 0.1),
        ):
            starts = torch.tensor([0, *counts]).cumsum(0).int()
            slots = torch.randperm(NUM_SLOTS, generator=generator)[: len(counts)]
            size = num_heads * keys[1] * value_dim
            states = normal(generator, 2 * NUM_SLOTS, size + 16, dtype=torch.float32)
            read = torch.arange(NUM_SLOTS)
            read[1], write = NUM_SLOTS + 1, read + NUM_SLOTS
            write[1] = 1
            num_computed = torch.tensor([0, 3, 9, 0, 1])
            states[read[num_computed == 0]] = torch.nan  # as another tenant may have left it
            width = 2 * keys[0] * keys[1] + num_heads * value_dim
            gates = normal(generator, int(starts[-1]), 2 * num_heads + 3, dtype=dtype)
            log_rates = normal(generator, num_heads, dtype=torch.float32) + torch.tensor(rate).log()
            yield Case(
                label=f"{dtype}, {counts} tokens, keys {keys}, values {(num_heads, value_dim)}",
                args=(
                    normal(generator, int(starts[-1]), width, dtype=dtype),
                    gates[:, : 2 * num_heads],
                    log_rates,
                    normal(generator, num_heads, dtype=torch.float32),
                    states[:, :size],
                    read,
                    write,
                    slots,
                    starts,
                    num_computed,
                    keys,
                    counts[0] > 1,
                ),
            )
