"""Blocks in slots of a disk: which follow which, and which is worth least."""

from __future__ import annotations

import heapq

import numpy as np

from quire.config.kv_disk.records import Records
from quire.errors import EngineError
from quire.kv_cache.notices import BlockName
from quire.protocol.block_moves import SavedBlock

__all__ = ["MAX_HITS", "SlotTree"]

NONE = -1

MAX_HITS = 32
"""Hits that count: what was asked for often, and is not any more, must go some day."""


class SlotTree:
    """Slots `0 … num_slots - 1`, each free or with a block. A block that follows another in a
    prompt is worth nothing without it, so the others go first: only leaves are dropped.

    A block's value is its hits above the value that was dropped last (GreedyDual with frequency,
    Cherkasova 1998; blocks have equal bytes and save equal work). So values age without a clock.
    """

    def __init__(self, num_slots: int, records: Records) -> None:
        """records: of the first slots; see `read_records`. Blocks without their parents are left
        out."""
        self.num_slots = num_slots
        self.slot_of: dict[BlockName, int] = {}
        self._name: list[BlockName | None] = [None] * num_slots
        self._value = [0.0] * num_slots
        self._hits = [0] * num_slots
        self._parent = np.full(num_slots, NONE, np.int64)
        self._num_children = np.zeros(num_slots, np.int64)
        self._held = np.zeros(num_slots, np.int64)
        self._heap: list[tuple[float, int]] = []
        self._age = 0.0
        self.dropped: BlockName | None = None  # by the last `take`
        unused = self._read(records)
        self._free = unused[::-1].tolist()

    def _read(self, records: Records) -> np.ndarray:
        """Take in records; return the slots that are free."""
        filled = np.zeros(self.num_slots, np.bool_)
        slots = (records["seal"][: self.num_slots] != 0).nonzero()[0]
        if not len(slots):
            return (~filled).nonzero()[0]
        known = records[slots]
        names = list(zip(known["group"].tolist(), known["name"].tolist(), strict=True))
        of_slot = dict(zip(names, slots.tolist(), strict=True))
        parent_names = zip(known["group"].tolist(), known["parent"].tolist(), strict=True)
        parents = np.array([of_slot.get(name, NONE) for name in parent_names], np.int64)
        has_parent = known["depth"] > 0
        parents[~has_parent] = NONE
        kept = np.array([of_slot[name] for name in names], np.int64) == slots  # one of twins
        kept &= ~has_parent | (parents != NONE)
        filled[slots[kept]] = True
        self._parent[slots] = parents
        while True:  # a pass for each generation of orphans
            orphans = filled & (self._parent != NONE) & ~filled[np.maximum(self._parent, 0)]
            if not orphans.any():
                break
            filled &= ~orphans
        self._parent[~filled] = NONE
        self._fill(slots, names, known, filled)
        return (~filled).nonzero()[0]

    def _fill(
        self, slots: np.ndarray, names: list[BlockName], known: Records, filled: np.ndarray
    ) -> None:
        is_kept = filled[slots].tolist()
        values, hits = known["value"].tolist(), known["hits"].tolist()
        for slot, name, value, count, kept in zip(
            slots.tolist(), names, values, hits, is_kept, strict=True
        ):
            if kept:
                self.slot_of[name] = slot
                self._name[slot] = name
                self._value[slot] = value
                self._hits[slot] = count
        own = self._parent[self._parent != NONE]
        self._num_children += np.bincount(own, minlength=self.num_slots)
        leaves = (filled & (self._num_children == 0)).nonzero()[0].tolist()
        self._heap = [(self._value[slot], slot) for slot in leaves]
        heapq.heapify(self._heap)
        self._age = self._heap[0][0] if self._heap else 0.0

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def num_free(self) -> int:
        return len(self._free)

    # --- slots ---------------------------------------------------------------------------------

    def take(self, ceiling: int) -> int | None:
        """Return a slot below `ceiling` for a new block: a free one, else that of the leaf which is
        worth least, whose block is dropped (`dropped`). None if all are held."""
        self.dropped = None
        if self._free and self._free[-1] < ceiling:
            return self._free.pop()
        below = next((slot for slot in self._free if slot < ceiling), None)
        if below is None:
            return self._evict(ceiling)
        self._free.remove(below)
        return below

    def _evict(self, ceiling: int) -> int | None:
        passed: list[tuple[float, int]] = []
        found: int | None = None
        while self._heap and found is None:
            value, slot = heapq.heappop(self._heap)
            if self._name[slot] is None or self._num_children[slot] or value != self._value[slot]:
                continue  # an entry of the past
            if self._held[slot] or slot >= ceiling:
                passed.append((value, slot))
            else:
                found = slot
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if found is not None:
            self._age = max(self._age, self._value[found])
            self.dropped = self._remove(found)
        return found

    def give_back(self, slot: int) -> None:
        """A slot without a block is free."""
        self._free.append(slot)

    def hold(self, slot: int) -> None:
        """Keep a block, or the block that will be in a slot, until `let_go`."""
        self._held[slot] += 1

    def let_go(self, slot: int) -> None:
        self._held[slot] -= 1

    def is_held(self, slot: int) -> bool:
        return bool(self._held[slot])

    # --- blocks --------------------------------------------------------------------------------

    def has_block(self, slot: int) -> bool:
        return self._name[slot] is not None

    def worth(self, slot: int) -> tuple[float, int]:
        """Return the value and the hits of the block in a slot."""
        return self._value[slot], self._hits[slot]

    def first_value(self) -> float:
        """Return the value of a block that is new."""
        return self._age + 1.0

    def put(self, slot: int, block: SavedBlock) -> None:
        """A slot has this block now. Its parent is there, if it has one."""
        name = (block.group, block.name)
        self._name[slot] = name
        self.slot_of[name] = slot
        self._value[slot], self._hits[slot] = block.value, block.hits
        parent = self.slot_of[block.group, block.parent] if block.parent else NONE
        self._parent[slot] = parent
        if parent != NONE:
            self._num_children[parent] += 1
        heapq.heappush(self._heap, (block.value, slot))

    def touch(self, slot: int) -> None:
        """The block in a slot was asked for."""
        hits = min(self._hits[slot] + 1, MAX_HITS)
        self._hits[slot] = hits
        self._value[slot] = self._age + 1.0 + hits
        if not self._num_children[slot]:
            heapq.heappush(self._heap, (self._value[slot], slot))
            self._compact()

    def drop(self, slot: int) -> list[BlockName]:
        """Drop the block in a slot and all that follow it. Return their names. Slots that nobody
        holds are free."""
        gone = [slot]
        if self._num_children[slot]:
            for each in gone:
                gone += (self._parent == each).nonzero()[0].tolist()
        names: list[BlockName] = []
        for each in reversed(gone):
            names.append(self._remove(each))
            if not self._held[each]:
                self._free.append(each)
        return names

    def drop_all(self) -> None:
        """Drop all blocks."""
        for slot in self.slot_of.values():
            self._name[slot] = None
            if not self._held[slot]:
                self._free.append(slot)
        self.slot_of.clear()
        self._heap.clear()
        self._parent[:] = NONE
        self._num_children[:] = 0

    def _remove(self, slot: int) -> BlockName:
        """Take a leaf out. Its slot is nobody's then."""
        name = self._name[slot]
        assert name is not None, "the slot has a block"
        del self.slot_of[name]
        self._name[slot] = None
        parent = int(self._parent[slot])
        self._parent[slot] = NONE
        if parent != NONE:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                heapq.heappush(self._heap, (self._value[parent], parent))
        return name

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self.slot_of) + 1024:
            leaves = [s for s in self.slot_of.values() if not self._num_children[s]]
            self._heap = [(self._value[slot], slot) for slot in leaves]
            heapq.heapify(self._heap)

    def check_invariants(self, num_unnamed: int) -> None:
        """EngineError unless slots, names, parents and free slots agree. num_unnamed: slots that
        are held for blocks that have not come, or whose blocks were dropped while held."""
        faults: list[str] = []
        if len(set(self._free)) != len(self._free):
            faults.append("a slot is twice free")
        if any(self._name[slot] is not None for slot in self._free):
            faults.append("a free slot has a block")
        if len(self._free) + len(self.slot_of) + num_unnamed != self.num_slots:
            faults.append("slots were lost")
        for name, slot in self.slot_of.items():
            if self._name[slot] != name:
                faults.append(f"slot {slot} does not know its name")
            parent = self._parent[slot]
            if parent != NONE and self._name[parent] is None:
                faults.append(f"slot {slot} follows an empty one")
        counts = np.bincount(self._parent[self._parent != NONE], minlength=self.num_slots)
        if (counts != self._num_children).any():
            faults.append("children are counted wrong")
        if faults:
            raise EngineError("the index of blocks on disk is broken: " + "; ".join(faults[:5]))
