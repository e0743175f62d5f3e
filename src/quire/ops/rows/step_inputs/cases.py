"""Rows of one token and of many, at the edges of blocks and of rows, with and without padding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.operation import Case

__all__ = ["make_inputs"]

NUM_SLOTS, MAX_LENGTH = 7, 700
NUM_COMPUTED = (0, 3, 4, 15, 16, MAX_LENGTH - 1, 0)


def make_inputs(generator: torch.Generator) -> Iterator[Case]:
    """Yield cases for `quire.ops.operation.Op`."""
    for block_size in (1, 4, 16):
        for rows, padding in (
            (((2, 1),), 0),
            (((4, 5), (0, 17), (5, 1)), 3),
            (((5, 1), (3, 300), (1, 1), (0, 1), (2, 600), (4, 2)), 0),
        ):
            yield _case(generator, block_size, rows, padding)


def _case(
    generator: torch.Generator, block_size: int, rows: tuple[tuple[int, int], ...], padding: int
) -> Case:
    """rows: slot and number of tokens."""
    num_rows, max_blocks = len(rows), -(-MAX_LENGTH // block_size)
    starts = torch.tensor([0, *(count for _, count in rows)]).cumsum(0)
    num_tokens = int(starts[-1]) + padding
    ids = torch.randint(1000, (NUM_SLOTS, MAX_LENGTH + 1), generator=generator)
    blocks = torch.randint(99, (NUM_SLOTS, max_blocks), generator=generator)
    return Case(
        label=f"rows {rows}, {padding} of padding, blocks of {block_size}",
        args=(
            torch.tensor([slot for slot, _ in rows]),
            starts.to(torch.int32),
            torch.tensor(NUM_COMPUTED),
            ids.to(torch.int32),
            blocks.to(torch.int32),
            block_size,
            torch.zeros(num_tokens, dtype=torch.int32),
            torch.zeros(num_tokens, dtype=torch.int64),
            torch.zeros(num_rows, dtype=torch.int32),
            torch.zeros(num_tokens, dtype=torch.int64),
            torch.full((num_rows, max_blocks), -1, dtype=torch.int32),
        ),
    )
