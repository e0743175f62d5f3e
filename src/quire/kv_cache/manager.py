"""Block tables: which physical block holds which tokens of which sequence, per layer group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.errors import EngineError
from quire.kv_cache.pool import BlockPool
from quire.protocol.step import IntArray

__all__ = ["KVManager", "PrefixHit", "TableUpdates"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix: `blocks[g][i]` holds block i of group g, or None where the
    group's window no longer reaches."""

    num_blocks: int
    blocks: tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True)
class TableUpdates:
    """Table entries that changed since the last drain, and the copies that must precede them."""

    group: list[int]
    slot: list[int]
    index: list[int]
    block: list[int]
    copy_src: list[int]
    copy_dst: list[int]


class KVManager:
    """Tables of the sequences that have a slot. Every count here is a plan-side upper bound.

    windows: per layer group, the sliding window or None. A sequence's tables have one logical
    length for all groups; a sliding group has released the entries before `_first`.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, len(windows))
        self._windows = tuple(windows)
        self._sliding = tuple((g, w) for g, w in enumerate(windows) if w is not None)
        max_blocks = -(-max_model_len // block_size)
        self._tables = [np.zeros((max_num_seqs, max_blocks), np.int32) for _ in windows]
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._first = [np.zeros(max_num_seqs, np.int64) for _ in windows]
        self._num_published = np.zeros(max_num_seqs, np.int64)
        self._shares_tail = np.zeros(max_num_seqs, np.bool_)
        self._updates = TableUpdates([], [], [], [], [], [])

    # --- growing -------------------------------------------------------------------------------

    def num_new_blocks(
        self,
        slots: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> int:
        """Blocks that `grow` would take, copies on write included. Shapes [R]."""
        lacking = np.maximum(-(-ends // self.block_size) - self._num_blocks[slots], 0)
        total = int(lacking.sum()) * len(self._windows)
        return total + self._num_copies(slots, starts)

    def _num_copies(self, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> int:
        """Of the owners of a shared tail block that write in one step, the last one of all owners
        writes in place; the others need a copy."""
        writers: dict[int, int] = {}
        for i in np.flatnonzero(self._shares_tail[slots]):
            for _, _, block in self._shared_tails(int(slots[i]), int(starts[i])):
                writers[block] = writers.get(block, 0) + 1
        return sum(min(count, self._num_owners(block) - 1) for block, count in writers.items())

    def grow(
        self,
        slots: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> bool:
        """Give each slot the blocks to hold tokens up to `ends`, of which the step writes those
        from `starts` on. False, and nothing is given, when they do not all fit; blocks that a
        window has left behind are released either way."""
        self._slide(slots, starts)
        if self.num_new_blocks(slots, starts, ends) > self.pool.num_available:
            return False
        for i in np.flatnonzero(self._shares_tail[slots]):
            self._copy_on_write(int(slots[i]), int(starts[i]))
        wanted = -(-ends // self.block_size)
        for i in np.flatnonzero(wanted > self._num_blocks[slots]):
            self._append_blocks(int(slots[i]), int(wanted[i]))
        return True

    def _append_blocks(self, slot: int, wanted: int) -> None:
        have = int(self._num_blocks[slot])
        for group, table in enumerate(self._tables):
            for index in range(have, wanted):
                block = self.pool.allocate()
                table[slot, index] = block
                self._record(group, slot, index, block)
        self._num_blocks[slot] = wanted

    def _slide(self, slots: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> None:
        """Release blocks that lie wholly before the window of the step's first query."""
        for group, window in self._sliding:
            first = self._first[group]
            needed = np.maximum(starts - window + 1, 0) // self.block_size
            for i in np.flatnonzero(needed > first[slots]):
                slot = int(slots[i])
                end = min(int(needed[i]), int(self._num_blocks[slot]))
                for index in range(end - 1, int(first[slot]) - 1, -1):
                    self.pool.release(int(self._tables[group][slot, index]))
                    self._tables[group][slot, index] = 0
                first[slot] = max(end, int(first[slot]))

    def _shared_tails(self, slot: int, start: int) -> list[tuple[int, int, int]]:
        """(group, index, block) of tail blocks that a write at `start` would share with others."""
        index = start // self.block_size
        if start % self.block_size == 0 or index >= self._num_blocks[slot]:
            return []
        blocks = [(g, index, int(table[slot, index])) for g, table in enumerate(self._tables)]
        return [entry for entry in blocks if self._num_owners(entry[2]) > 1]

    def _num_owners(self, block: int) -> int:
        """Tables that name the block; references held for copies are not owners."""
        return self.pool.ref_count(block) - self._updates.copy_src.count(block)

    def _copy_on_write(self, slot: int, start: int) -> None:
        for group, index, shared in self._shared_tails(slot, start):
            block = self.pool.allocate()
            self._updates.copy_src.append(shared)  # its reference is kept until the drain, so
            self._updates.copy_dst.append(block)  # that it cannot become a destination as well
            self._tables[group][slot, index] = block
            self._record(group, slot, index, block)
        self._shares_tail[slot] = False

    def _record(self, group: int, slot: int, index: int, block: int) -> None:
        self._updates.group.append(group)
        self._updates.slot.append(slot)
        self._updates.index.append(index)
        self._updates.block.append(block)

    def drain(self) -> TableUpdates:
        """What changed since the last call; copy sources lose the reference held for the copy."""
        updates = self._updates
        self._updates = TableUpdates([], [], [], [], [], [])
        for block in updates.copy_src:
            self.pool.release(block)
        return updates

    def forget_updates(self, slot: int) -> None:
        """Drop what was recorded of a slot that will not enter after all."""
        updates = self._updates
        kept = [i for i, owner in enumerate(updates.slot) if owner != slot]
        self._updates = TableUpdates(
            group=[updates.group[i] for i in kept],
            slot=[updates.slot[i] for i in kept],
            index=[updates.index[i] for i in kept],
            block=[updates.block[i] for i in kept],
            copy_src=updates.copy_src,
            copy_dst=updates.copy_dst,
        )

    # --- coming, branching, going --------------------------------------------------------------

    def lookup(self, names: Sequence[bytes], max_tokens: int) -> PrefixHit:
        """The longest prefix of at most `max_tokens` tokens whose blocks every group still has.

        names: of the sequence's full blocks. A full group needs all blocks, a sliding group those
        that the next token's window reaches.
        """
        limit = min(len(names), max_tokens // self.block_size)
        for group, window in enumerate(self._windows):
            if window is None:
                hits = 0
                while hits < limit and self.pool.find(group, names[hits]) is not None:
                    hits += 1
                limit = hits
        while limit > 0:
            missing = self._last_missing(names, limit)
            if missing < 0:
                break
            limit = missing
        blocks = tuple(
            tuple(
                self.pool.find(group, names[i]) if i >= self._first_needed(window, limit) else None
                for i in range(limit)
            )
            for group, window in enumerate(self._windows)
        )
        return PrefixHit(limit, blocks)

    def _first_needed(self, window: int | None, num_blocks: int) -> int:
        if window is None:
            return 0
        return max(num_blocks * self.block_size - window + 1, 0) // self.block_size

    def _last_missing(self, names: Sequence[bytes], num_blocks: int) -> int:
        """The last block index that some sliding group lacks for this prefix, or -1."""
        missing = -1
        for group, window in self._sliding:
            for i in range(num_blocks - 1, self._first_needed(window, num_blocks) - 1, -1):
                if self.pool.find(group, names[i]) is None:
                    missing = max(missing, i)
                    break
        return missing

    def enter(self, slot: int, hit: PrefixHit) -> None:
        """Start the tables of an empty slot with the blocks of a prefix hit."""
        for group, blocks in enumerate(hit.blocks):
            first = next((i for i, b in enumerate(blocks) if b is not None), hit.num_blocks)
            self._first[group][slot] = first
            for index in range(first, hit.num_blocks):
                block = blocks[index]
                if block is None:
                    raise EngineError(f"prefix hit has a hole at block {index} of group {group}")
                self.pool.share(block)
                self._tables[group][slot, index] = block
        self._num_blocks[slot] = hit.num_blocks
        self._num_published[slot] = hit.num_blocks
        self._shares_tail[slot] = False

    def fork(self, src: int, dst: int) -> None:
        """`dst`, an empty slot, shares all blocks of `src`, the partly filled one too."""
        length = int(self._num_blocks[src])
        for group, table in enumerate(self._tables):
            first = int(self._first[group][src])
            self._first[group][dst] = first
            table[dst, :length] = table[src, :length]
            for index in range(first, length):
                self.pool.share(int(table[src, index]))
        self._num_blocks[dst] = length
        self._num_published[dst] = self._num_published[src]
        self._shares_tail[src] = True
        self._shares_tail[dst] = True

    def free(self, slot: int) -> None:
        """Release a slot's blocks, last ones first, so that prefixes are evicted last."""
        length = int(self._num_blocks[slot])
        for group, table in enumerate(self._tables):
            for index in range(length - 1, int(self._first[group][slot]) - 1, -1):
                self.pool.release(int(table[slot, index]))
            table[slot, :length] = 0
            self._first[group][slot] = 0
        self._num_blocks[slot] = 0
        self._num_published[slot] = 0
        self._shares_tail[slot] = False

    def tables(self, slot: int) -> tuple[IntArray, ...]:
        """Copies of a slot's block tables, one per group; released entries are 0."""
        length = int(self._num_blocks[slot])
        return tuple(table[slot, :length].copy() for table in self._tables)

    # --- publishing ----------------------------------------------------------------------------

    def num_published(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Blocks already published or taken from the cache, by slot."""
        return self._num_published[slots]

    def publish(self, slot: int, names: Sequence[bytes], num_blocks: int, root: bytes) -> None:
        """Let others find this slot's blocks up to `num_blocks`, whose names are known."""
        for index in range(int(self._num_published[slot]), num_blocks):
            parent = names[index - 1] if index else root
            for group, table in enumerate(self._tables):
                if index >= self._first[group][slot]:
                    self.pool.publish(int(table[slot, index]), group, names[index], parent)
        self._num_published[slot] = num_blocks

    def retract(self, slot: int, num_valid_tokens: int) -> set[int]:
        """Unpublish this slot's blocks beyond `num_valid_tokens`, and all that depend on them."""
        start = num_valid_tokens // self.block_size
        blocks = [
            int(table[slot, index])
            for group, table in enumerate(self._tables)
            for index in range(
                max(start, int(self._first[group][slot])), int(self._num_published[slot])
            )
        ]
        self._num_published[slot] = min(start, int(self._num_published[slot]))
        return self.pool.retract(blocks)

    def holders(self, blocks: set[int], slots: Sequence[int]) -> list[int]:
        """Those of `slots` whose tables name any of `blocks`."""
        return [
            slot
            for slot in slots
            if any(
                block in blocks
                for group, table in enumerate(self._tables)
                for block in table[slot, self._first[group][slot] : self._num_blocks[slot]].tolist()
            )
        ]

    # --- truths --------------------------------------------------------------------------------

    def num_held_blocks(self, slot: int) -> int:
        return sum(int(self._num_blocks[slot] - first[slot]) for first in self._first)

    def check_invariants(self) -> None:
        """EngineError unless free + used + cached = total and references equal table entries."""
        references: dict[int, int] = {}
        for block in self._updates.copy_src:
            references[block] = references.get(block, 0) + 1
        for slot in np.flatnonzero(self._num_blocks):
            for group, table in enumerate(self._tables):
                for block in table[
                    slot, self._first[group][slot] : self._num_blocks[slot]
                ].tolist():
                    references[block] = references.get(block, 0) + 1
        self.pool.check_invariants(references)
