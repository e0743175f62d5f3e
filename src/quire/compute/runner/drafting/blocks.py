"""K/V of a draft model: the tokens of each block that it has computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from quire.compute.runner.rows import RowTable, Slots
from quire.protocol.step import StepPlan

__all__ = ["DraftBlocks"]

CopyBlocks = Callable[[torch.Tensor, torch.Tensor], None]


class DraftBlocks:
    """A draft model's pool has a block for each of the model's, with the same number and tokens. So
    prefixes, forks and copies need no bookkeeping of their own, but the draft model computes later
    than the model, or never: each block knows how many of its first tokens are there. What is not
    there is computed before it is read, also within a prefix that is shared: all who compute it
    write the same.
    """

    def __init__(
        self,
        rows: RowTable,
        group: int,
        block_size: int,
        num_blocks: int,
        copy_blocks: CopyBlocks,
    ) -> None:
        """group: layer group of the model whose block tables are followed. copy_blocks: copies
        blocks src to dst, int64 [N], within the draft model's pool."""
        self._rows = rows
        self._group = group
        self._size = block_size
        self._num_filled = np.zeros(num_blocks, np.int64)
        self._copy_blocks = copy_blocks

    def apply(self, plan: StepPlan) -> None:
        """Follow a plan's difference, after the rows have. Blocks that a row was given for tokens
        still to come have none; copies have what their sources have."""
        of_group = plan.table_group == self._group
        self._num_filled[plan.table_block[of_group]] = 0
        self._num_filled[plan.load_dst] = 0
        for row in plan.enter:
            blocks = row.block_tables[self._group]
            self._cut(blocks, row.num_computed_tokens)
        if len(plan.copy_src):
            self._num_filled[plan.copy_dst] = self._num_filled[plan.copy_src]
            src, dst = plan.copy_src.astype(np.int64), plan.copy_dst.astype(np.int64)
            self._copy_blocks(torch.from_numpy(src), torch.from_numpy(dst))
        slots = plan.rewind_slot.astype(np.int64)
        num_computed = self._rows.num_computed[slots]
        self.cut(slots, num_computed, num_computed + plan.rewind_tokens)

    def cut(self, slots: Slots, starts: Slots, ends: Slots) -> None:
        """Rows `slots` [R] have forgotten their tokens `starts` [R] up to `ends` [R]."""
        tables = self._rows.tables[self._group]
        rows = zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for slot, start, end in rows:
            self._cut(tables[slot, : -(-end // self._size)], start)

    def _cut(self, blocks: npt.NDArray[np.int32], num_tokens: int) -> None:
        first = num_tokens // self._size
        self._num_filled[blocks[first + 1 :]] = 0
        if first < len(blocks):
            block = blocks[first]
            self._num_filled[block] = min(self._num_filled[block], num_tokens % self._size)

    def num_computed(self, slot: int) -> int:
        """Return how many of a row's first tokens are there, of those that the model computed."""
        num_tokens = int(self._rows.num_computed[slot])
        blocks = self._rows.tables[self._group][slot, : -(-num_tokens // self._size)]
        filled = self._num_filled[blocks]
        is_open = filled < self._size
        first = int(is_open.argmax()) if is_open.any() else len(blocks)
        there = first * self._size + (int(filled[first]) if first < len(blocks) else 0)
        return min(there, num_tokens)

    def fill(self, slot: int, start: int, end: int) -> None:
        """Tokens start ... end - 1 of a row were computed, and all before them are there."""
        first, last = start // self._size, (end - 1) // self._size
        blocks = self._rows.tables[self._group][slot, first : last + 1]
        self._num_filled[blocks[:-1]] = self._size
        self._num_filled[blocks[-1]] = end - last * self._size
