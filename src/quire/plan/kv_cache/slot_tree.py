"""Tree of the blocks in a disk's slots, from parents to children, and its least valuable leaf."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.config.kv_disk.records import Records
from quire.plan.kv_cache.notices import BlockName
from quire.protocol.block_moves import SavedBlock

__all__ = ["MAX_HITS", "SlotTree"]

NONE = -1
"""Slot of the parent of a block that has none."""

LOST = -2
"""Slot of a parent that is not there."""

Slots = npt.NDArray[np.int64]

MAX_HITS = 32
"""Number of hits that count. They age, so that blocks once in demand go some day."""

GUARDED = 2.0**40
"""Added to the value of a guarded block among leaves: more than values ever reach."""


class SlotTree:
    """Slots `0 … num_slots - 1`, each free or with a block. A block that follows another in a
    prompt is worth nothing without it, so the others go first: only leaves are dropped.

    A block's value is its hits above the value that was dropped last (GreedyDual with frequency,
    Cherkasova 1998; blocks have equal bytes and save equal work). So values age without a clock.
    Guarded blocks go when there is no other leaf.
    """

    def __init__(self, num_slots: int, records: Records) -> None:
        """records: the first slots' records; see `read_records`. Blocks without their parents are
        left out."""
        self.num_slots = num_slots
        self._slot_of: dict[int, dict[bytes, int]] = {}  # by group and name
        self._name: list[bytes | None] = [None] * num_slots
        self._group = np.zeros(num_slots, np.int64)
        self._value = np.zeros(num_slots)
        self._hits = np.zeros(num_slots, np.int64)
        self._parent = np.full(num_slots, NONE, np.int64)
        self._num_children = np.zeros(num_slots, np.int64)
        self._held = [0] * num_slots
        self._guarded = Counter[bytes]()  # by name
        self._heap: list[tuple[float, int]] = []
        self._age = 0.0
        self.dropped: BlockName | None = None  # by the last `take`
        filled = self._read(records[:num_slots])
        self._free: list[int] = (~filled).nonzero()[0].tolist()  # a heap: the first ones fill first
        leaves = (filled & (self._num_children == 0)).nonzero()[0]
        self._heap = list(zip(self._value[leaves].tolist(), leaves.tolist(), strict=True))
        heapq.heapify(self._heap)
        self._age = self._heap[0][0] if self._heap else 0.0

    def _read(self, records: Records) -> npt.NDArray[np.bool_]:
        """Take in records. Return which slots have a block then."""
        filled = np.zeros(self.num_slots, np.bool_)
        filled[: len(records)] = records["seal"] != 0
        count = len(records)
        self._group[:count] = records["group"]
        self._value[:count] = records["value"]
        self._hits[:count] = records["hits"]
        for group in np.unique(self._group[filled]).tolist():
            slots = (filled & (self._group == group)).nonzero()[0]
            self._read_group(group, slots, records[slots], filled)
        while True:  # a pass for each generation of orphans
            orphans = filled & (self._parent != NONE) & ~filled[np.maximum(self._parent, 0)]
            if not orphans.any():
                break
            filled &= ~orphans
            for slot in orphans.nonzero()[0].tolist():
                self._forget(slot)
        self._parent[~filled] = NONE
        children = np.bincount(self._parent[filled & (self._parent != NONE)])
        self._num_children[: len(children)] = children
        return filled

    def _read_group(
        self, group: int, slots: Slots, known: Records, filled: npt.NDArray[np.bool_]
    ) -> None:
        names: list[bytes] = known["name"].tolist()
        places: list[int] = slots.tolist()
        self._slot_of[group] = slot_of = dict(zip(names, places, strict=True))
        for slot, name in zip(places, names, strict=True):
            self._name[slot] = name
        kept = np.ones(len(names), np.bool_)
        if len(slot_of) < len(names):  # of twins, the last one counts
            kept = np.fromiter(map(slot_of.__getitem__, names), np.int64, len(names)) == slots
            filled[slots[~kept]] = False
            for slot in slots[~kept].tolist():
                self._name[slot] = None
        # Most blocks stand right behind their parents.
        follows = np.full(len(names), LOST)
        is_next = (known["parent"][1:] == known["name"][:-1]) & kept[:-1]
        follows[1:][is_next] = slots[:-1][is_next]
        others = (follows == LOST).nonzero()[0]
        parents = map(slot_of.get, known["parent"][others].tolist(), repeat(LOST))
        follows[others] = np.fromiter(parents, np.int64, len(others))
        has_parent = known["depth"] > 0
        filled[slots[has_parent & (follows == LOST)]] = False
        for slot in slots[has_parent & (follows == LOST)].tolist():
            self._forget(slot)
        self._parent[slots] = np.where(has_parent & (follows != LOST), follows, NONE)

    def _forget(self, slot: int) -> None:
        """Take a name out, if the slot has one."""
        name = self._name[slot]
        if name is not None:
            del self._slot_of[int(self._group[slot])][name]
            self._name[slot] = None

    def __len__(self) -> int:
        return sum(map(len, self._slot_of.values()))

    def find(self, group: int, name: bytes) -> int | None:
        """Return the slot of a block."""
        slots = self._slot_of.get(group)
        return None if slots is None else slots.get(name)

    def names(self) -> Iterator[BlockName]:
        """All blocks."""
        return ((group, name) for group, names in self._slot_of.items() for name in names)

    def with_parents(self) -> Iterator[tuple[BlockName, bytes | None]]:
        """All blocks, each after its parent, and the name of the parent; None without one."""
        done: set[int] = set()
        for group, slot_of in self._slot_of.items():
            for each in slot_of.values():
                slot, line = each, list[int]()
                while slot != NONE and slot not in done:
                    done.add(slot)
                    line.append(slot)
                    slot = int(self._parent[slot])
                for slot in reversed(line):
                    name = self._name[slot]
                    assert name is not None, "a slot of the index has a block"
                    yield (group, name), self.parent_of(group, name)

    def parent_of(self, group: int, name: bytes) -> bytes | None:
        """Return the name of the block before another one; None without one."""
        slot = self.find(group, name)
        above = NONE if slot is None else int(self._parent[slot])
        return None if above == NONE else self._name[above]

    def names_beyond(self, other: SlotTree) -> Iterator[BlockName]:
        """Blocks that another tree does not have."""
        for group, names in self._slot_of.items():
            for name in names.keys() - other._slot_of.get(group, {}).keys():
                yield group, name

    @property
    def num_free(self) -> int:
        return len(self._free)

    # --- slots ---------------------------------------------------------------------------------

    def take(self, ceiling: int) -> int | None:
        """Return a slot below `ceiling` for a new block: a free one, else that of the leaf which is
        worth least, whose block is dropped (`dropped`). None if all are held."""
        self.dropped = None
        if self._free and self._free[0] < ceiling:
            return heapq.heappop(self._free)
        return self._evict(ceiling)

    def _evict(self, ceiling: int) -> int | None:
        passed: list[tuple[float, int]] = []
        found: int | None = None
        while self._heap and found is None:
            value, slot = heapq.heappop(self._heap)
            if self._name[slot] is None or self._num_children[slot] or value != self._rank(slot):
                continue  # an entry of the past
            if self._held[slot] or slot >= ceiling:
                passed.append((value, slot))
            else:
                found = slot
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if found is not None:
            self._age = max(self._age, float(self._value[found]))
            self.dropped = self._remove(found)
        return found

    def _rank(self, slot: int) -> float:
        """Return the place of a block among leaves. Those with the lowest go first."""
        return float(self._value[slot]) + GUARDED * (self._name[slot] in self._guarded)

    def _offer(self, slot: int) -> None:
        """Let a block go when its turn comes, if it is a leaf."""
        if not self._num_children[slot]:
            heapq.heappush(self._heap, (self._rank(slot), slot))

    def guard(self, names: Iterable[bytes]) -> None:
        """Let blocks of these names, in all groups, go after all others, also those that come
        later. Each call counts, until `unguard`."""
        for name in names:
            self._guarded[name] += 1
            if self._guarded[name] == 1:
                self._offer_again(name)

    def unguard(self, names: Iterable[bytes]) -> None:
        """Take one `guard` of these names back."""
        for name in names:
            self._guarded[name] -= 1
            if not self._guarded[name]:
                del self._guarded[name]
                self._offer_again(name)

    def _offer_again(self, name: bytes) -> None:
        """Let blocks of this name, in all groups, take their new places among leaves."""
        for slot_of in self._slot_of.values():
            if (slot := slot_of.get(name)) is not None:
                self._offer(slot)

    def give_back(self, slot: int) -> None:
        """A slot without a block is free."""
        heapq.heappush(self._free, slot)

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

    def block(self, slot: int) -> BlockName | None:
        """Return what the block in a slot is called, if there is one."""
        name = self._name[slot]
        return None if name is None else (int(self._group[slot]), name)

    def worth(self, slot: int) -> tuple[float, int]:
        """Return the value and the hits of the block in a slot."""
        return float(self._value[slot]), int(self._hits[slot])

    def first_value(self) -> float:
        """Return the value of a block that is new."""
        return self._age + 1.0

    def put(self, slot: int, block: SavedBlock) -> None:
        """A slot has this block now. Its parent is there, if it has one."""
        self._name[slot], self._group[slot] = block.name, block.group
        self._slot_of.setdefault(block.group, {})[block.name] = slot
        self._value[slot], self._hits[slot] = block.value, block.hits
        parent = self.find(block.group, block.parent) if block.parent else None
        self._parent[slot] = NONE if parent is None else parent
        if parent is not None:
            self._num_children[parent] += 1
        self._offer(slot)

    def touch(self, slot: int) -> None:
        """The block in a slot was asked for."""
        hits = min(int(self._hits[slot]) + 1, MAX_HITS)
        value = self._age + 1.0 + hits
        self._hits[slot], self._value[slot] = hits, value
        self._offer(slot)
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
                self.give_back(each)
        return names

    def drop_all(self) -> None:
        """Drop all blocks."""
        for slots in self._slot_of.values():
            for slot in slots.values():
                self._name[slot] = None
                if not self._held[slot]:
                    self.give_back(slot)
        self._slot_of.clear()
        self._heap.clear()
        self._parent[:] = NONE
        self._num_children[:] = 0

    def _remove(self, slot: int) -> BlockName:
        """Take a leaf out. Its slot is nobody's then."""
        name = self._name[slot]
        assert name is not None, "the slot has a block"
        group = int(self._group[slot])
        self._forget(slot)
        parent = int(self._parent[slot])
        self._parent[slot] = NONE
        if parent != NONE:
            self._num_children[parent] -= 1
            self._offer(parent)
        return group, name

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self) + 1024:
            slots = (slot for each in self._slot_of.values() for slot in each.values())
            leaves = [slot for slot in slots if not self._num_children[slot]]
            self._heap = [(self._rank(slot), slot) for slot in leaves]
            heapq.heapify(self._heap)

    def check_invariants(self, num_unnamed: int) -> None:
        """EngineError unless slots, names, parents and free slots agree. num_unnamed: slots that
        are held for blocks that have not come, or whose blocks were dropped while held."""
        faults: list[str] = []
        if len(set(self._free)) != len(self._free):
            faults.append("a slot is twice free")
        if any(self._name[slot] is not None for slot in self._free):
            faults.append("a free slot has a block")
        if len(self._free) + len(self) + num_unnamed != self.num_slots:
            faults.append("slots were lost")
        for group, name in self.names():
            slot = self._slot_of[group][name]
            if (self._group[slot], self._name[slot]) != (group, name):
                faults.append(f"slot {slot} does not know its name")
            parent = self._parent[slot]
            if parent != NONE and self._name[parent] is None:
                faults.append(f"slot {slot} follows an empty one")
        counts = np.bincount(self._parent[self._parent != NONE], minlength=self.num_slots)
        if (counts != self._num_children).any():
            faults.append("children are counted wrong")
        if faults:
            raise EngineError("the index of blocks on disk is broken: " + "; ".join(faults[:5]))
