"""Rows at the first and last token of a block, at the first and last of their row, in any order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case

__all__ = ["make_inputs"]

NUM_SLOTS, MAX_LENGTH = 6, 40


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for block_size in (1, 4, 16):
        for slots in ([2], [4, 0, 5], [5, 3, 1, 0, 2, 4]):
            num_rows, max_blocks = len(slots), -(-MAX_LENGTH // block_size)
            ids = torch.randint(1000, (NUM_SLOTS, MAX_LENGTH + 1), generator=generator)
            blocks = torch.randint(99, (NUM_SLOTS, max_blocks), generator=generator)
            yield Case(
                label=f"rows {slots}, blocks of {block_size}",
                args=(
                    torch.tensor(slots),
                    torch.tensor([0, 3, 4, 15, 16, MAX_LENGTH - 1]),
                    ids.to(torch.int32),
                    blocks.to(torch.int32),
                    block_size,
                    torch.zeros(num_rows, dtype=torch.int32),
                    torch.zeros(num_rows, dtype=torch.int64),
                    torch.zeros(num_rows, dtype=torch.int32),
                    torch.zeros(num_rows, dtype=torch.int64),
                    torch.full((num_rows, max_blocks), -1, dtype=torch.int32),
                ),
            )
