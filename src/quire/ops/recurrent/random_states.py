"""Random states of rows, for the cases of recurrent operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops.random_tensors import normal

__all__ = ["NUM_SLOTS", "random_rows"]

NUM_SLOTS = 5


def random_rows(
    generator: torch.Generator,
    counts: Sequence[int],
    size: int,
    dtype: torch.dtype,
    *,
    padding: int,
) -> tuple[torch.Tensor, ...]:
    """Return states, read, write, slots, starts and num_computed of rows with `counts` tokens
    (`quire.ops.recurrent.short_conv`). size: elements of a state; places have `padding` more. Fresh
    rows find NaN in theirs."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    slots = torch.randperm(NUM_SLOTS, generator=generator)[: len(counts)]
    states = normal(generator, 2 * NUM_SLOTS, size + padding, dtype=dtype)
    read = torch.arange(NUM_SLOTS)
    read[1], write = NUM_SLOTS + 1, read + NUM_SLOTS
    write[1] = 1
    num_computed = torch.tensor([0, 3, 9, 0, 1])
    states[read[num_computed == 0]] = torch.nan  # as another tenant may have left it
    return states[:, :size], read, write, slots, starts, num_computed
