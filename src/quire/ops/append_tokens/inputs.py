"""One row and many, rows that failed, and the spare row once and twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case

__all__ = ["make_inputs"]

NUM_SLOTS, MAX_LENGTH = 7, 40


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Cases as `quire.ops.operation.Op` asks."""
    for slots, dtype, spare in (
        ([2], torch.int32, NUM_SLOTS - 1),
        ([4, 0, 6], torch.int64, NUM_SLOTS - 1),
        ([5, 3, 1, 0, 2, 4, 6, 6], torch.int32, NUM_SLOTS - 1),
        ([6, 3, 0], torch.int32, -1),
    ):
        token_ids = torch.randint(1, 1000, (len(slots),), generator=generator)
        token_ids[1::3] = -1
        row_tokens = torch.randint(1000, (NUM_SLOTS, MAX_LENGTH), generator=generator)
        num_tokens = torch.tensor([1, 3, 4, 15, 16, MAX_LENGTH - 1, 1])
        yield Case(
            label=f"slots {slots}, {dtype}, spare {spare}",
            args=(
                torch.tensor(slots),
                token_ids.to(dtype),
                num_tokens - 1,
                num_tokens,
                row_tokens.to(torch.int32),
                spare,
            ),
        )
