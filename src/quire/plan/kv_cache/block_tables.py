"""Block tables: the blocks of each slot, per layer group. Arrays alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from quire.config.kv_layout import KVGroup
from quire.protocol.step import IntArray

__all__ = ["BlockTables"]


class BlockTables:
    """Tables of the sequences that have a slot.

    by_group: block ids of each group by slot and index, int32 [max_num_seqs, blocks of the longest
        sequence].
    num_blocks: logical length of the table, per group and slot.
    first: first index that is held, per group and slot; a sliding group has released the entries
        before it, and they are 0.
    """

    def __init__(self, groups: Sequence[KVGroup], max_num_seqs: int, max_model_len: int) -> None:
        self.groups = tuple(groups)
        self.sliding = tuple(
            (i, group, group.window) for i, group in enumerate(groups) if group.window is not None
        )
        self.by_group = [
            np.zeros((max_num_seqs, group.blocks_for(max_model_len)), np.int32) for group in groups
        ]
        self.num_blocks = _columns(len(groups), max_num_seqs)
        self.first = _columns(len(groups), max_num_seqs)

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def start(self, slot: int, group: int, first: int, blocks: Sequence[int]) -> None:
        """Fill a group's table of an empty slot from index `first` on."""
        self.first[group][slot] = first
        self.num_blocks[group][slot] = first + len(blocks)
        self.by_group[group][slot, first : first + len(blocks)] = blocks

    def held(self, slot: int, group: int) -> list[int]:
        """The blocks of one table, but for those that its window has released."""
        start, end = self.first[group][slot], self.num_blocks[group][slot]
        return self.by_group[group][slot, start:end].tolist()

    def held_of_prefix(
        self, slot: int, num_tokens: int, next_query: int
    ) -> list[tuple[int, list[int]]]:
        """Per group, the first index and the blocks of a slot's first tokens, but for those that
        the query at position `next_query` does not read."""
        found: list[tuple[int, list[int]]] = []
        for group, first, table in zip(self.groups, self.first, self.by_group, strict=True):
            end = group.blocks_for(num_tokens)
            start = min(max(int(first[slot]), group.first_block_needed(next_query)), end)
            found.append((start, table[slot, start:end].tolist()))
        return found

    def advance_first(self, slot: int, group: int, first: int) -> list[int]:
        """Empty the entries before index `first`; the blocks that they held."""
        start = int(self.first[group][slot])
        end = min(first, int(self.num_blocks[group][slot]))
        table = self.by_group[group]
        blocks: list[int] = table[slot, start:end].tolist()
        table[slot, start:end] = 0
        self.first[group][slot] = max(start, end)
        return blocks

    def cut(self, slot: int, group: int, num_blocks: int) -> list[int]:
        """Empty a table's entries from index `num_blocks` on; the blocks that they held."""
        table = self.by_group[group]
        start = max(num_blocks, int(self.first[group][slot]))
        end = int(self.num_blocks[group][slot])
        blocks: list[int] = table[slot, start:end].tolist()
        table[slot, start:end] = 0
        self.num_blocks[group][slot] = num_blocks
        return blocks

    def clear(self, slot: int) -> list[list[int]]:
        """Empty a slot's tables; the blocks that they held, per group."""
        held = [self.held(slot, group) for group in range(self.num_groups)]
        for table, count, first in zip(self.by_group, self.num_blocks, self.first, strict=True):
            table[slot, : count[slot]] = 0
            count[slot] = 0
            first[slot] = 0
        return held

    def copies(self, slot: int) -> tuple[IntArray, ...]:
        """Copies of a slot's tables, one per group."""
        pairs = zip(self.by_group, self.num_blocks, strict=True)
        return tuple(table[slot, : count[slot]].copy() for table, count in pairs)

    def num_held(self, slot: int) -> int:
        """Entries of a slot's tables in all groups."""
        pairs = zip(self.num_blocks, self.first, strict=True)
        return sum(int(count[slot] - first[slot]) for count, first in pairs)

    @property
    def num_entries(self) -> int:
        """Number of entries of all slots."""
        pairs = zip(self.num_blocks, self.first, strict=True)
        return sum(int((count - first).sum()) for count, first in pairs)

    def entries(self) -> Iterator[int]:
        """Every block that a table names, as often as it is named."""
        for group, count in enumerate(self.num_blocks):
            for slot in np.flatnonzero(count).tolist():
                yield from self.held(slot, group)


def _columns(num_groups: int, max_num_seqs: int) -> list[npt.NDArray[np.int64]]:
    return [np.zeros(max_num_seqs, np.int64) for _ in range(num_groups)]
