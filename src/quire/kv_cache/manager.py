"""Block tables: which physical block holds which tokens of which sequence, per layer group."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from quire.errors import EngineError
from quire.kv_cache.host_tier import HostTier
from quire.kv_cache.pool import BlockPool
from quire.kv_cache.saved_tables import SavedTables
from quire.protocol.step import IntArray

__all__ = ["KVManager", "PrefixHit", "TableUpdates"]

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix: `blocks[g][i]` holds block i of group g, or None where the
    group's window no longer reaches. num_tokens: that it covers; less than its blocks hold if the
    last one is that of a pinned prefix and partly filled."""

    num_tokens: int
    num_blocks: int
    blocks: tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True, slots=True)
class TableUpdates:
    """Table entries that changed since the last drain, and the copies that must precede them:
    within the device, out to the host (swap_out_src is on the device) and in from it."""

    group: list[int] = field(default_factory=list[int])
    slot: list[int] = field(default_factory=list[int])
    index: list[int] = field(default_factory=list[int])
    block: list[int] = field(default_factory=list[int])
    copy_src: list[int] = field(default_factory=list[int])
    copy_dst: list[int] = field(default_factory=list[int])
    swap_out_src: list[int] = field(default_factory=list[int])
    swap_out_dst: list[int] = field(default_factory=list[int])
    swap_in_src: list[int] = field(default_factory=list[int])
    swap_in_dst: list[int] = field(default_factory=list[int])


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
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, len(windows))
        self.host = HostTier(num_host_blocks)
        self.num_groups = len(windows)
        self._windows = tuple(windows)
        self._sliding = tuple((g, w) for g, w in enumerate(windows) if w is not None)
        max_blocks = -(-max_model_len // block_size)
        self._tables = [np.zeros((max_num_seqs, max_blocks), np.int32) for _ in windows]
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._first = [np.zeros(max_num_seqs, np.int64) for _ in windows]
        self._num_published = np.zeros(max_num_seqs, np.int64)
        self._shares_tail = np.zeros(max_num_seqs, np.bool_)
        self._updates = TableUpdates()
        self._held: set[SavedTables] = set()
        self._mark = 0
        # publications that may still be retracted: mark, slot, index, block, name
        self._log: deque[tuple[int, int, int, int, bytes]] = deque()

    # --- growing -------------------------------------------------------------------------------

    def grow(self, slots: Slots, starts: Slots, ends: Slots) -> bool:
        """Give each slot the blocks to hold tokens up to `ends`, of which the step writes those
        from `starts` on. Shapes [R]. False, and nothing is given, when they do not all fit; blocks
        that a window has left behind are released either way."""
        self._slide(slots, starts)
        lacking = -(-ends // self.block_size) - self._num_blocks[slots]
        growing = (lacking > 0).nonzero()[0]
        sharing = self._shares_tail[slots].nonzero()[0]
        if not len(growing) and not len(sharing):
            return True
        needed = int(lacking[growing].sum()) * self.num_groups
        if needed + self._num_copies(slots, starts, sharing) > self.pool.num_available:
            return False
        for i in sharing.tolist():
            self._copy_on_write(int(slots[i]), int(starts[i]))
        if len(growing):
            self._append_blocks(slots[growing], lacking[growing])
        return True

    def _append_blocks(self, slots: Slots, counts: Slots) -> None:
        """`counts` more blocks for each of `slots`, in every group."""
        total = int(counts.sum())
        owner, index = slots, self._num_blocks[slots]
        if total > len(slots):  # not one for each, as in decoding
            place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
            owner, index = np.repeat(owner, counts), np.repeat(index, counts) + place
        updates = self._updates
        for group, table in enumerate(self._tables):
            blocks = self.pool.allocate_many(total)
            table[owner, index] = blocks
            updates.group.extend([group] * total)
            updates.slot.extend(owner.tolist())
            updates.index.extend(index.tolist())
            updates.block.extend(blocks)
        self._num_blocks[slots] += counts

    def _num_copies(self, slots: Slots, starts: Slots, sharing: Slots) -> int:
        """Of the owners of a shared tail block that write in one step, the last one of all owners
        writes in place; the others need a copy."""
        writers: dict[int, int] = {}
        for i in sharing.tolist():
            for _, _, block in self._shared_tails(int(slots[i]), int(starts[i])):
                writers[block] = writers.get(block, 0) + 1
        return sum(min(count, self._num_owners(block) - 1) for block, count in writers.items())

    def _slide(self, slots: Slots, starts: Slots) -> None:
        """Release blocks that lie wholly before the window of the step's first query."""
        for group, window in self._sliding:
            first = self._first[group]
            needed = np.maximum(starts - window + 1, 0) // self.block_size
            for i in (needed > first[slots]).nonzero()[0].tolist():
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
        self._updates = TableUpdates()
        for block in updates.copy_src:
            self.pool.release(block)
        self.host.let_go()
        return updates

    def forget_updates(self, slots: Collection[int]) -> None:
        """Drop what was recorded of slots that enter with whole tables, or not at all."""
        updates = self._updates
        kept = [i for i, owner in enumerate(updates.slot) if owner not in slots]
        self._updates = replace(
            updates,
            group=[updates.group[i] for i in kept],
            slot=[updates.slot[i] for i in kept],
            index=[updates.index[i] for i in kept],
            block=[updates.block[i] for i in kept],
        )

    def forget_copies(self) -> None:
        """Drop copies into blocks that nobody holds any more."""
        updates = self._updates
        pairs = list(zip(updates.copy_src, updates.copy_dst, strict=True))
        kept = [(src, dst) for src, dst in pairs if self.pool.ref_count(dst)]
        if len(kept) == len(pairs):
            return
        for src, dst in pairs:
            if not self.pool.ref_count(dst):
                self.pool.release(src)
        updates.copy_src[:] = [src for src, _ in kept]
        updates.copy_dst[:] = [dst for _, dst in kept]

    # --- coming, branching, going --------------------------------------------------------------

    def lookup(
        self, names: Sequence[bytes], max_tokens: int, held: SavedTables | None = None
    ) -> PrefixHit:
        """The longest prefix of at most `max_tokens` tokens whose blocks every group still has.

        names: of the sequence's full blocks. A full group needs all blocks, a sliding group those
        that the next token's window reaches. held: of a held sequence with which this one starts:
        its full blocks are there whatever they are called, so that a tenant's own blocks behind a
        prefix that all share are found.
        """
        limit = min(len(names), max_tokens // self.block_size)
        given = self._full_blocks(held)
        runs: dict[int, list[int]] = {}
        for group, window in enumerate(self._windows):
            if window is None:
                start = list(given[group].values())[:limit]
                runs[group] = start + self.pool.find_run(group, names[len(start) : limit])
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
        return PrefixHit(limit * self.block_size, limit, blocks)

    def _full_blocks(self, held: SavedTables | None) -> list[dict[int, int]]:
        """Per group, the full blocks of a held sequence by their index."""
        if held is None:
            return [{} for _ in self._windows]
        end = held.num_tokens // self.block_size
        return [
            dict(zip(range(first, end), blocks, strict=False))
            for first, blocks in zip(held.first, held.blocks, strict=True)
        ]

    def _find(
        self, group: int, index: int, names: Sequence[bytes], given: Sequence[dict[int, int]]
    ) -> int | None:
        block = given[group].get(index)
        return self.pool.find(group, names[index]) if block is None else block

    def hit_of(self, held: SavedTables, max_tokens: int) -> PrefixHit:
        """The first `max_tokens` tokens of a held sequence at most, the partly filled block too."""
        num_tokens = min(held.num_tokens, max_tokens)
        num_blocks = -(-num_tokens // self.block_size)
        blocks = tuple(
            (*[None] * first, *blocks)[:num_blocks]
            for first, blocks in zip(held.first, held.blocks, strict=True)
        )
        return PrefixHit(num_tokens, num_blocks, blocks)

    def num_blocks_to_enter(self, hit: PrefixHit, num_tokens: int) -> int:
        """Available blocks that go when a sequence enters with `hit` and grows to `num_tokens`:
        new ones, those of the hit that nobody uses now, and the copy of a partly filled one."""
        has_tail = hit.num_tokens % self.block_size != 0
        new = (-(-num_tokens // self.block_size) - hit.num_blocks + has_tail) * self.num_groups
        return new + sum(self.pool.num_unused(blocks) for blocks in hit.blocks)

    def _first_needed(self, window: int | None, num_blocks: int) -> int:
        if window is None:
            return 0
        return max(num_blocks * self.block_size - window + 1, 0) // self.block_size

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

    def enter(self, slot: int, hit: PrefixHit) -> None:
        """Start the tables of an empty slot with the blocks of a prefix hit."""
        for group, blocks in enumerate(hit.blocks):
            held = [block for block in blocks if block is not None]
            first = hit.num_blocks - len(held)
            if None in blocks[first:]:
                raise EngineError(f"the prefix hit {blocks} has a hole: take it from lookup")
            self.pool.share(held)
            self._first[group][slot] = first
            self._tables[group][slot, first : hit.num_blocks] = held
        self._num_blocks[slot] = hit.num_blocks
        self._num_published[slot] = hit.num_tokens // self.block_size
        self._shares_tail[slot] = hit.num_tokens % self.block_size != 0

    def fork(self, src: int, dst: int) -> None:
        """`dst`, an empty slot, shares all blocks of `src`, the partly filled one too."""
        length = int(self._num_blocks[src])
        for group, table in enumerate(self._tables):
            first = int(self._first[group][src])
            self._first[group][dst] = first
            table[dst, :length] = table[src, :length]
            self.pool.share(table[src, first:length].tolist())
        self._num_blocks[dst] = length
        self._num_published[dst] = self._num_published[src]
        self._shares_tail[src] = True
        self._shares_tail[dst] = True

    def free(self, slot: int) -> None:
        """Release a slot's blocks, last ones first, so that prefixes are evicted last."""
        length = int(self._num_blocks[slot])
        for group, table in enumerate(self._tables):
            for block in reversed(table[slot, self._first[group][slot] : length].tolist()):
                self.pool.release(block)
            table[slot, :length] = 0
            self._first[group][slot] = 0
        self._num_blocks[slot] = 0
        self._num_published[slot] = 0
        self._shares_tail[slot] = False

    def tables(self, slot: int) -> tuple[IntArray, ...]:
        """Copies of a slot's block tables, one per group; released entries are 0."""
        length = int(self._num_blocks[slot])
        return tuple(table[slot, :length].copy() for table in self._tables)

    # --- host memory ---------------------------------------------------------------------------

    def swap_out(self, slots: Slots, num_tokens: Slots) -> list[SavedTables] | None:
        """Copy to the host what `slots` hold of their first `num_tokens` [R] tokens; they are still
        to be freed. None, and nothing happens, if the host has no room for all of it."""
        tables = [
            self._held_blocks(slot, count, count)
            for slot, count in zip(slots.tolist(), num_tokens.tolist(), strict=True)
        ]
        distinct = {block for groups in tables for _, blocks in groups for block in blocks}
        awaits_copy = not distinct.isdisjoint(self._updates.copy_dst)  # made after the swap
        if awaits_copy or not self.host.has_room(len(distinct)):
            return None
        stored, place = self.host.store(num_tokens.tolist(), tables)
        self._updates.swap_out_src.extend(place.keys())
        self._updates.swap_out_dst.extend(place.values())
        return stored

    def _held_blocks(
        self, slot: int, num_tokens: int, next_query: int
    ) -> list[tuple[int, list[int]]]:
        """Per group, the first index and the blocks of a slot's first tokens, but for those that
        lie wholly before the window of the query at position `next_query`."""
        end = -(-num_tokens // self.block_size)
        starts = [min(int(first[slot]), end) for first in self._first]
        for group, window in self._sliding:
            needed = max(next_query - window + 1, 0) // self.block_size
            starts[group] = min(max(starts[group], needed), end)
        return [
            (start, table[slot, start:end].tolist())
            for start, table in zip(starts, self._tables, strict=True)
        ]

    def num_blocks_to_swap_in(self, swapped: Sequence[SavedTables], ends: Sequence[int]) -> int:
        """Available blocks that go at most when these sequences come back, and grow to `ends`."""
        whole: set[int] = set()
        count = 0
        for tables, end in zip(swapped, ends, strict=True):
            num_full, num_blocks = self._num_full(tables), -(-tables.num_tokens // self.block_size)
            for first, blocks in zip(tables.first, tables.blocks, strict=True):
                whole.update(blocks[: max(num_full - first, 0)])
                count += len(blocks[max(num_full - first, 0) :])
            count += (-(-end // self.block_size) - num_blocks) * self.num_groups
        return count + len(whole)

    def swap_in(
        self, slots: Sequence[int], swapped: Sequence[SavedTables], names: Sequence[list[bytes]]
    ) -> None:
        """Start the tables of empty slots with what the host has of them. Full blocks that they
        shared they share again; one that the cache still has under its name is not copied."""
        placed: dict[int, int] = {}
        for slot, tables, chain in zip(slots, swapped, names, strict=True):
            num_full, num_blocks = self._num_full(tables), -(-tables.num_tokens // self.block_size)
            for group, (first, blocks) in enumerate(zip(tables.first, tables.blocks, strict=True)):
                row = [
                    self._fetch(group, host, placed, chain[i : i + 1])
                    if i < num_full
                    else self._copy_in(host)
                    for i, host in enumerate(blocks, first)
                ]
                self._first[group][slot] = first
                self._tables[group][slot, first:num_blocks] = row
            self._num_blocks[slot] = num_blocks
            self._num_published[slot] = 0
            self._shares_tail[slot] = False
            self.host.release(tables)

    def _num_full(self, swapped: SavedTables) -> int:
        """Blocks that nobody writes any more; a partly filled one is not shared after a swap,
        because each of its owners is about to write into it."""
        return swapped.num_tokens // self.block_size

    def _fetch(self, group: int, host: int, placed: dict[int, int], name: list[bytes]) -> int:
        """The device block of a full host block, one reference more to it."""
        block = placed.get(host)
        if block is None and name:
            block = self.pool.find(group, name[0])
        if block is None:
            block = self._copy_in(host)
        else:
            self.pool.share([block])
        placed[host] = block
        return block

    def _copy_in(self, host: int) -> int:
        block = self.pool.allocate()
        self.host.hold([host])
        self._updates.swap_in_src.append(host)
        self._updates.swap_in_dst.append(block)
        return block

    def discard(self, swapped: SavedTables) -> None:
        """Nobody wants this sequence's K/V back."""
        unused = set(self.host.release(swapped))
        updates = self._updates
        if unused.isdisjoint(updates.swap_out_dst):
            return
        pairs = zip(updates.swap_out_src, updates.swap_out_dst, strict=True)
        kept = [(src, dst) for src, dst in pairs if dst not in unused]
        updates.swap_out_src[:] = [src for src, _ in kept]
        updates.swap_out_dst[:] = [dst for _, dst in kept]

    # --- held sequences ------------------------------------------------------------------------

    def hold(self, slot: int, num_tokens: int) -> SavedTables:
        """Keep the blocks of a slot's first tokens after the slot has been freed."""
        tables = self._held_blocks(slot, num_tokens, num_tokens - 1)
        first = tuple(first for first, _ in tables)
        held = SavedTables(num_tokens, first, tuple(tuple(blocks) for _, blocks in tables))
        self.pool.share(held.all_blocks())
        self._shares_tail[slot] = True
        self._held.add(held)
        return held

    def release_held(self, held: SavedTables) -> None:
        self._held.remove(held)
        for block in reversed(held.all_blocks()):
            self.pool.release(block)

    # --- publishing ----------------------------------------------------------------------------

    def num_published(self, slots: Slots) -> Slots:
        """Blocks already published or taken from the cache, by slot."""
        return self._num_published[slots]

    def publish(self, slot: int, names: Sequence[bytes], num_blocks: int) -> None:
        """Let others find this slot's blocks up to `num_blocks`, whose names are known."""
        published = int(self._num_published[slot])
        for group, table in enumerate(self._tables):
            start = published
            if self._windows[group] is not None:
                start = max(start, int(self._first[group][slot]))
            for index, block in enumerate(table[slot, start:num_blocks].tolist(), start):
                name = names[index]
                if self.pool.publish(block, group, name):
                    self._log.append((self._mark, slot, index, block, name))
        self._num_published[slot] = num_blocks

    def publish_next(self, slots: Slots, names: Sequence[bytes]) -> None:
        """Publish one block more of each of `slots` [N], under `names` [N]: for the steady step, in
        which a few of many sequences complete a block."""
        index = self._num_published[slots]
        rows = list(zip(slots.tolist(), index.tolist(), names, strict=True))
        for group, table in enumerate(self._tables):
            blocks = table[slots, index].tolist()
            held = (index >= self._first[group][slots]).tolist()
            for (slot, place, name), block, is_held in zip(rows, blocks, held, strict=True):
                if is_held and self.pool.publish(block, group, name):
                    self._log.append((self._mark, slot, place, block, name))
        self._num_published[slots] = index + 1

    def mark(self) -> int:
        """A new mark in the order of publications, for `retract` and `settle`."""
        self._mark += 1
        return self._mark

    def retract(self, mark: int) -> None:
        """Unpublish all blocks that were published since `mark`; the slots that still hold them
        may publish them again."""
        while self._log and self._log[-1][0] >= mark:
            _, slot, index, block, name = self._log.pop()
            self.pool.retract(block, name)
            self._num_published[slot] = min(self._num_published[slot], index)

    def settle(self, mark: int) -> None:
        """What was published before `mark` is certain, and will not be retracted."""
        while self._log and self._log[0][0] < mark:
            self._log.popleft()

    # --- truths --------------------------------------------------------------------------------

    @property
    def num_table_entries(self) -> int:
        """Blocks that all tables name together, pinned ones included; more than are in use where
        sequences share."""
        held = sum(len(each.all_blocks()) for each in self._held)
        return held + sum(int((self._num_blocks - first).sum()) for first in self._first)

    def num_held_blocks(self, slot: int) -> int:
        return sum(int(self._num_blocks[slot] - first[slot]) for first in self._first)

    def check_invariants(self) -> None:
        """EngineError unless free + used + cached = total and references equal table entries."""
        references: dict[int, int] = {}
        for block in self._updates.copy_src:
            references[block] = references.get(block, 0) + 1
        for block in (block for held in self._held for block in held.all_blocks()):
            references[block] = references.get(block, 0) + 1
        for slot in np.flatnonzero(self._num_blocks):
            for group, table in enumerate(self._tables):
                for block in table[
                    slot, self._first[group][slot] : self._num_blocks[slot]
                ].tolist():
                    references[block] = references.get(block, 0) + 1
        self.pool.check_invariants(references)
        self.host.check_invariants()
