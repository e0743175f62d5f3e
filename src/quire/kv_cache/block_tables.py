"""Which block holds which tokens of which slot, per layer group: the arrays alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from quire.protocol.step import IntArray

__all__ = ["BlockTables", "Windows", "first_block_needed"]

Windows = tuple[int | None, ...]
"""Per layer group, the sliding window in tokens, or None where all tokens are seen."""


def first_block_needed(window: int | None, query: int, block_size: int) -> int:
    """Index of the first block that the window of a query at position `query` reaches."""
    return 0 if window is None else max(query - window + 1, 0) // block_size


class BlockTables:
    """Tables of the sequences that have a slot.

    by_group: per group, block ids by slot and index, int32 [max_num_seqs, blocks of the longest
        sequence].
    num_blocks: by slot, the logical length of its tables, one for all groups.
    first: per group and by slot, the first index that is held; a sliding group has released the
        entries before it, and they are 0.
    """

    def __init__(
        self, windows: Windows, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.windows = windows
        self.block_size = block_size
        self.sliding = tuple((g, w) for g, w in enumerate(windows) if w is not None)
        max_blocks = -(-max_model_len // block_size)
        self.by_group = [np.zeros((max_num_seqs, max_blocks), np.int32) for _ in windows]
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.first: list[npt.NDArray[np.int64]] = [
            np.zeros(max_num_seqs, np.int64) for _ in windows
        ]

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def start(self, slot: int, group: int, first: int, blocks: Sequence[int]) -> None:
        """Fill a group's table of an empty slot from index `first` on."""
        self.first[group][slot] = first
        self.by_group[group][slot, first : first + len(blocks)] = blocks

    def held(self, slot: int, group: int) -> list[int]:
        """The blocks of one table, but for those that its window has released."""
        return self.by_group[group][slot, self.first[group][slot] : self.num_blocks[slot]].tolist()

    def held_of_prefix(
        self, slot: int, num_tokens: int, next_query: int
    ) -> list[tuple[int, list[int]]]:
        """Per group, the first index and the blocks of a slot's first tokens, but for those that
        lie wholly before the window of the query at position `next_query`."""
        end = self.blocks_for(num_tokens)
        starts = [
            min(max(int(first[slot]), first_block_needed(window, next_query, self.block_size)), end)
            for first, window in zip(self.first, self.windows, strict=True)
        ]
        return [
            (start, table[slot, start:end].tolist())
            for start, table in zip(starts, self.by_group, strict=True)
        ]

    def advance_first(self, slot: int, group: int, first: int) -> list[int]:
        """Empty the entries before index `first`; the blocks that they held."""
        start, end = int(self.first[group][slot]), min(first, int(self.num_blocks[slot]))
        table = self.by_group[group]
        blocks: list[int] = table[slot, start:end].tolist()
        table[slot, start:end] = 0
        self.first[group][slot] = max(start, end)
        return blocks

    def cut(self, slot: int, num_blocks: int) -> list[list[int]]:
        """Empty the entries from index `num_blocks` on; the blocks that they held, per group."""
        blocks: list[list[int]] = []
        for table, first in zip(self.by_group, self.first, strict=True):
            start, end = max(num_blocks, int(first[slot])), int(self.num_blocks[slot])
            blocks.append(table[slot, start:end].tolist())
            table[slot, start:end] = 0
        self.num_blocks[slot] = num_blocks
        return blocks

    def clear(self, slot: int) -> list[list[int]]:
        """Empty a slot's tables; the blocks that they held, per group."""
        held = [self.held(slot, group) for group in range(self.num_groups)]
        for table, first in zip(self.by_group, self.first, strict=True):
            table[slot, : self.num_blocks[slot]] = 0
            first[slot] = 0
        self.num_blocks[slot] = 0
        return held

    def copies(self, slot: int) -> tuple[IntArray, ...]:
        """Copies of a slot's tables, one per group."""
        return tuple(table[slot, : self.num_blocks[slot]].copy() for table in self.by_group)

    def num_held(self, slot: int) -> int:
        """Entries of a slot's tables in all groups."""
        return sum(int(self.num_blocks[slot] - first[slot]) for first in self.first)

    @property
    def num_entries(self) -> int:
        """Of all slots."""
        return sum(int((self.num_blocks - first).sum()) for first in self.first)

    def entries(self) -> Iterator[int]:
        """Every block that a table names, as often as it is named."""
        for slot in np.flatnonzero(self.num_blocks).tolist():
            for group in range(self.num_groups):
                yield from self.held(slot, group)
