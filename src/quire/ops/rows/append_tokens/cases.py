"""One row and many, rows that failed, the spare row once and twice, with and without positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case

__all__ = ["make_inputs"]

NUM_SLOTS, MAX_LENGTH = 7, 40


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for slots, dtype, spare, has_positions in (
        ([2], torch.int32, NUM_SLOTS - 1, True),
        ([4, 0, 6], torch.int64, NUM_SLOTS - 1, False),
        ([5, 3, 1, 0, 2, 4, 6, 6], torch.int32, NUM_SLOTS - 1, True),
        ([6, 3, 0], torch.int32, -1, True),
        ([1, 6], torch.int32, NUM_SLOTS - 1, False),
    ):
        token_ids = torch.randint(1, 1000, (len(slots),), generator=generator)
        token_ids[1::3] = -1
        row_tokens = torch.randint(1000, (NUM_SLOTS, MAX_LENGTH), generator=generator)
        num_tokens = torch.tensor([1, 3, 4, 15, 16, MAX_LENGTH - 1, 1])
        yield Case(
            label=f"slots {slots}, {dtype}, spare {spare}, positions {has_positions}",
            args=(
                torch.tensor(slots),
                token_ids.to(dtype),
                num_tokens - 1,
                num_tokens,
                row_tokens.to(torch.int32),
                spare,
                torch.zeros(len(slots), dtype=torch.int64) if has_positions else None,
            ),
        )
