"""Sequences whose K/V wait in host memory: which host block holds which of their blocks."""

from __future__ import annotations

from collections import Counter

from quire.kv_cache.pool import BlockPool
from quire.kv_cache.saved_tables import SavedTables

__all__ = ["HostTier"]


class HostTier:
    """Host blocks with the reference counts of the device blocks they stand for, so that what
    sequences of a group share is kept once (Kwon et al. 2023, section 4.5)."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks, 1)
        self._tables: set[SavedTables] = set()
        self._held = Counter[int]()  # sources of copies to the device that have not ended

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    def has_room(self, count: int) -> bool:
        return count <= self._pool.num_available

    def store(
        self, num_tokens: list[int], tables: list[list[tuple[int, list[int]]]]
    ) -> tuple[list[SavedTables], dict[int, int]]:
        """Host blocks for sequences given by their tokens and, per group, first index and device
        blocks. What stands for them, and the host block of each device block. There is room."""
        place: dict[int, int] = {}
        stored: list[SavedTables] = []
        for tokens, groups in zip(num_tokens, tables, strict=True):
            for block in (block for _, blocks in groups for block in blocks):
                if block in place:
                    self._pool.share([place[block]])
                else:
                    place[block] = self._pool.allocate()
            first = tuple(first for first, _ in groups)
            blocks = tuple(tuple(place[block] for block in blocks) for _, blocks in groups)
            stored.append(SavedTables(tokens, first, blocks))
        self._tables.update(stored)
        return stored, place

    def release(self, swapped: SavedTables) -> list[int]:
        """Release a sequence's host blocks; return the ones that are free now."""
        self._tables.remove(swapped)
        for block in swapped.all_blocks():
            self._pool.release(block)
        return [block for block in swapped.all_blocks() if not self._pool.ref_count(block)]

    def hold(self, blocks: list[int]) -> None:
        """Keep sources of copies until `let_go`."""
        self._pool.share(blocks)
        self._held.update(blocks)

    def let_go(self, blocks: list[int]) -> None:
        """The copies that read these blocks have ended."""
        for block in blocks:
            self._pool.release(block)
        self._held.subtract(blocks)

    def check_invariants(self) -> None:
        """EngineError unless references equal what swapped sequences and pending copies name."""
        references = Counter(self._held)
        for swapped in self._tables:
            references.update(swapped.all_blocks())
        self._pool.check_invariants(references)
