"""Finds the longest cached prefix of a sequence that enters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kv_cache.block_tables import Windows, first_block_needed
from quire.kv_cache.pool import BlockPool
from quire.kv_cache.saved_tables import SavedTables

__all__ = ["PrefixHit", "PrefixLookup"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix: `blocks[g][i]` holds block i of group g, or None where the
    group's window no longer reaches. num_tokens: that it covers; less than its blocks hold if the
    last one is that of a pinned prefix and partly filled."""

    num_tokens: int
    num_blocks: int
    blocks: tuple[tuple[int | None, ...], ...]


class PrefixLookup:
    """Looks into the pool and into held sequences; changes nothing.

    A full group needs all blocks of a prefix, a sliding group those that the next token's window
    reaches.
    """

    def __init__(self, pool: BlockPool, windows: Windows, block_size: int) -> None:
        self._pool = pool
        self._windows = windows
        self._sliding = tuple((g, w) for g, w in enumerate(windows) if w is not None)
        self._block_size = block_size

    def lookup(
        self, names: Sequence[bytes], max_tokens: int, held: SavedTables | None = None
    ) -> PrefixHit:
        """The longest prefix of at most `max_tokens` tokens whose blocks every group still has.

        names: of the sequence's full blocks. held: of a held sequence with which this one starts:
        its full blocks are there whatever they are called, so that a tenant's own blocks behind a
        prefix that all share are found; if there are none, its partly filled block is shared too.
        """
        hit = self._of_full_blocks(names, max_tokens, self._full_blocks(held))
        if held is None or min(held.num_tokens, max_tokens) <= hit.num_tokens:
            return hit
        return self._of_held(held, max_tokens)

    def num_blocks_to_enter(self, hit: PrefixHit, num_tokens: int) -> int:
        """Available blocks that go when a sequence enters with `hit` and grows to `num_tokens`:
        new ones, those of the hit that nobody uses now, and the copy of a partly filled one."""
        has_tail = hit.num_tokens % self._block_size != 0
        new = -(-num_tokens // self._block_size) - hit.num_blocks + has_tail
        unused = sum(self._pool.num_unused(blocks) for blocks in hit.blocks)
        return new * len(self._windows) + unused

    def _of_full_blocks(
        self, names: Sequence[bytes], max_tokens: int, given: Sequence[dict[int, int]]
    ) -> PrefixHit:
        limit = min(len(names), max_tokens // self._block_size)
        runs: dict[int, list[int]] = {}
        for group, window in enumerate(self._windows):
            if window is None:
                start = list(given[group].values())[:limit]
                runs[group] = start + self._pool.find_run(group, names[len(start) : limit])
                limit = len(runs[group])
        while limit > 0:
            missing = self._last_missing(names, limit, given)
            if missing < 0:
                break
            limit = missing
        blocks = tuple(
            tuple(runs[group][:limit])
            if window is None
            else tuple(
                self._find(group, i, names, given)
                if i >= self._first_needed(window, limit)
                else None
                for i in range(limit)
            )
            for group, window in enumerate(self._windows)
        )
        return PrefixHit(limit * self._block_size, limit, blocks)

    def _of_held(self, held: SavedTables, max_tokens: int) -> PrefixHit:
        """The first `max_tokens` tokens of a held sequence at most, the partly filled block too."""
        num_tokens = min(held.num_tokens, max_tokens)
        num_blocks = -(-num_tokens // self._block_size)
        blocks = tuple(
            (*[None] * first, *blocks)[:num_blocks]
            for first, blocks in zip(held.first, held.blocks, strict=True)
        )
        return PrefixHit(num_tokens, num_blocks, blocks)

    def _full_blocks(self, held: SavedTables | None) -> list[dict[int, int]]:
        """Per group, the full blocks of a held sequence by their index."""
        if held is None:
            return [{} for _ in self._windows]
        end = held.num_tokens // self._block_size
        return [
            dict(zip(range(first, end), blocks, strict=False))
            for first, blocks in zip(held.first, held.blocks, strict=True)
        ]

    def _last_missing(
        self, names: Sequence[bytes], num_blocks: int, given: Sequence[dict[int, int]]
    ) -> int:
        """The last block index that some sliding group lacks for this prefix, or -1."""
        missing = -1
        for group, window in self._sliding:
            for i in range(num_blocks - 1, self._first_needed(window, num_blocks) - 1, -1):
                if self._find(group, i, names, given) is None:
                    missing = max(missing, i)
                    break
        return missing

    def _find(
        self, group: int, index: int, names: Sequence[bytes], given: Sequence[dict[int, int]]
    ) -> int | None:
        block = given[group].get(index)
        return self._pool.find(group, names[index]) if block is None else block

    def _first_needed(self, window: int, num_blocks: int) -> int:
        """By the query that follows a prefix of so many blocks."""
        return first_block_needed(window, num_blocks * self._block_size, self._block_size)
