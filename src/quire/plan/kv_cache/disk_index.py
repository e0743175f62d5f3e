"""Index of a disk tier: the slots of its blocks, and the blocks to write next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from quire.config.kv_disk.records import Records
from quire.plan.kv_cache.notices import BlockName, Listener, Notice, NoticeKind
from quire.plan.kv_cache.slot_tree import SlotTree
from quire.protocol.block_moves import MoveKind, MoveOutcome, SavedBlock

__all__ = ["DISK_TIER", "DiskIndex"]

DISK_TIER = 1
"""Number of the disk among the tiers, behind `HOST_TIER`. No plan names its places: they are
copied beside the steps."""

PATIENCE = 1024
"""Blocks that are offered to a full disk until the next one is tried beyond its end."""

WEIGHT = 0.2
"""Share of the newest load in the measured seconds per block, if it was slower than those before;
what a disk has done once it can do."""

ENOUGH = 8
"""Loads of fewer blocks measure nothing: most of their time is that of a call. Nor do those that
lose blocks, which fail sooner than a disk can read."""

RETRY = 0.98
"""Factor of the measured seconds after each load that did not seem to pay, so that a disk that was
slow once is tried again."""


class DiskIndex:
    """Blocks in slots of a file, as a `BlockSource` that is written as blocks are computed, and not
    as they are evicted.

    A block is taken with its parent, or after it. It can be loaded when its move has ended. What is
    worth least goes when a slot is needed (`SlotTree`).
    """

    def __init__(
        self, num_slots: int, records: Records, *, news: Callable[[], SlotTree | None] | None = None
    ) -> None:
        """records: records of an earlier run. news: returns the blocks that another process has
        written meanwhile, if it has; None for the process that writes the files."""
        self._tree = SlotTree(num_slots, records)
        self._is_writer = news is None
        self._news = news
        self._is_retired = False
        self._ceiling = num_slots
        self._patience = 0
        self._reading: dict[int, list[int]] = {}
        self._writing: dict[int, dict[BlockName, tuple[int, SavedBlock, int | None]]] = {}
        self._coming = set[BlockName]()  # blocks of `_writing`
        self._void: set[int] = set()  # tickets of moves before everything was dropped
        self._stalled: dict[int, MoveKind] = {}  # by ticket of the move that ends a stall
        self._listeners: list[Listener] = []
        self._touched: dict[int, None] = {}  # slots, in order
        self._seconds_per_block = 0.0
        self.seconds_read = self.seconds_written = 0.0

    @property
    def tier(self) -> int:
        return DISK_TIER

    @property
    def num_slots(self) -> int:
        return self._tree.num_slots

    @property
    def num_named(self) -> int:
        """Blocks that can be loaded."""
        return len(self._tree)

    def blocks(self) -> Iterator[tuple[BlockName, bytes | None]]:
        """All blocks that can be loaded, parents first, and the name of the parent of each."""
        return self._tree.with_parents()

    def parent_of(self, block: BlockName) -> bytes | None:
        """Return the name of the block before a block; None without one."""
        return self._tree.parent_of(*block)

    def stats(self) -> Mapping[str, Any]:
        """Return the readings of `SchedulerStats` on the disk."""
        return {
            "num_disk_blocks": self._tree.num_slots,
            "num_named_disk_blocks": len(self._tree),
            "disk_read_seconds_total": self.seconds_read,
            "disk_write_seconds_total": self.seconds_written,
        }

    @property
    def takes_more(self) -> bool:
        """True if blocks may be saved."""
        return self._is_writer and not self._is_retired

    # --- loads ---------------------------------------------------------------------------------

    @property
    def offers_loads(self) -> bool:
        """False while loads stall, and for files of other weights."""
        return not self._is_retired and MoveKind.LOAD not in self._stalled.values()

    def num_held(self, group: int, names: Sequence[bytes]) -> int:
        """Return the count as in `BlockSource`. 0 while loads stall."""
        if not self.offers_loads:
            return 0
        count = 0
        for name in names:
            if self._tree.find(group, name) is None:
                break
            count += 1
        return count

    def load(self, blocks: Sequence[BlockName], ticket: int) -> list[int]:
        slots = [slot for each in blocks if (slot := self._tree.find(*each)) is not None]
        if self._is_writer:  # nothing else gives slots away
            for slot in slots:
                self._tree.hold(slot)
            self._reading[ticket] = slots
        return slots

    def saved(self, slot: int, block: BlockName) -> SavedBlock:
        """Return what a move to the device must find in a slot."""
        value, hits = self._tree.worth(slot)
        return SavedBlock(*block, value=value, hits=hits)

    def seconds_to_load(self, num_blocks: int) -> float:
        """Return what a load costs, by the loads before; 0.0 if there was none."""
        return num_blocks * self._seconds_per_block

    def declined(self) -> None:
        """A load did not seem to pay."""
        self._seconds_per_block *= RETRY

    def stall(self, kind: MoveKind, ticket: int) -> None:
        """A move of this kind took longer than anybody waits. After loads, nothing starts before
        `ticket` ends, and after saves, no save."""
        self._stalled[ticket] = kind

    def look_again(self) -> None:
        """Take in what another process has written, now and then."""
        tree = None if self._news is None else self._news()
        if tree is not None:
            old, self._tree = self._tree, tree
            for name in old.names_beyond(tree):
                self._tell(NoticeKind.REMOVED, name)
            for name in tree.names_beyond(old):
                self._tell(NoticeKind.STORED, name)

    def touch(self, blocks: Sequence[BlockName]) -> None:
        """Note a use of blocks, also where the device had them."""
        for block in blocks:
            if (slot := self._tree.find(*block)) is not None:
                self._tree.touch(slot)
                if self._is_writer:
                    self._touched[slot] = None

    def take_touched(self, at_least: int) -> dict[int, SavedBlock]:
        """Return blocks by slot that were used since the last call, with their values and hits;
        none while they are fewer than `at_least`."""
        if len(self._touched) < at_least or not self.takes_more:
            return {}
        slots, self._touched = list(self._touched), {}
        named = ((slot, self._tree.block(slot)) for slot in slots)
        return {slot: self.saved(slot, block) for slot, block in named if block is not None}

    def guard(self, names: Sequence[bytes]) -> None:
        """See `SlotTree.guard`. A reader drops nothing."""
        if self._is_writer:
            self._tree.guard(names)

    def unguard(self, names: Sequence[bytes]) -> None:
        """See `SlotTree.unguard`."""
        if self._is_writer:
            self._tree.unguard(names)

    # --- saves ---------------------------------------------------------------------------------

    def store(self, blocks: Sequence[BlockName], ticket: int) -> Mapping[BlockName, int]:
        """Take nothing: evicted blocks were offered before."""
        del blocks, ticket
        return {}

    def save(self, blocks: Sequence[SavedBlock], ticket: int) -> dict[int, tuple[int, SavedBlock]]:
        """Return slots for those of `blocks` that are to be written, and what their records say, by
        place among `blocks`."""
        taken: dict[int, tuple[int, SavedBlock]] = {}
        writing: dict[BlockName, tuple[int, SavedBlock, int | None]] = {}
        if not self.takes_more or self._stalled:
            return taken
        for index, block in enumerate(blocks):
            name, parent = (block.group, block.name), (block.group, block.parent)
            if self._tree.find(*name) is not None or name in self._coming:
                continue
            above = self._tree.find(*parent) if block.parent else None
            if block.parent and above is None and parent not in self._coming:
                continue
            if above is not None:
                self._tree.hold(above)
            slot = self._take_slot()
            if slot is None:
                if above is not None:
                    self._tree.let_go(above)
                break
            self._tree.hold(slot)
            worth = SavedBlock(*block[:4], value=self._tree.first_value())
            taken[index], writing[name] = (slot, worth), (slot, worth, above)
            self._coming.add(name)
        if writing:
            self._writing[ticket] = writing
        return taken

    def _take_slot(self) -> int | None:
        """Return a slot; the blocks that it costs are told. Beyond what a full disk has room for,
        one is tried now and then."""
        if self._ceiling < self._tree.num_slots:
            self._patience -= 1
            if self._patience <= 0:
                self._patience, self._ceiling = PATIENCE, self._tree.num_slots
        slot = self._tree.take(self._ceiling)
        if self._tree.dropped is not None:
            self._tell(NoticeKind.REMOVED, self._tree.dropped)
        return slot

    def end_move(self, kind: MoveKind, outcome: MoveOutcome, count: int) -> None:
        """Learn from the time that a move of `count` blocks took."""
        if kind is MoveKind.SAVE:
            self.seconds_written += outcome.seconds
        elif kind is MoveKind.LOAD:
            self.seconds_read += outcome.seconds
            if count >= ENOUGH and not len(outcome.lost):
                each, known = outcome.seconds / count, self._seconds_per_block
                if known and each > known:
                    each = known + WEIGHT * (each - known)
                self._seconds_per_block = each

    def end(self, ticket: int, lost: Collection[int]) -> None:
        self._stalled.pop(ticket, None)
        for slot in self._reading.pop(ticket, ()):
            self._let_go(slot)
        written = self._writing.pop(ticket, {})
        is_wanted = ticket not in self._void
        self._void.discard(ticket)
        for name, (slot, block, above) in written.items():
            self._coming.remove(name)
            has_parent = not block.parent or self._tree.find(block.group, block.parent) is not None
            self._tree.let_go(slot)
            if slot in lost:
                self._ceiling, self._patience = min(self._ceiling, max(slot, 1)), PATIENCE
            if is_wanted and has_parent and slot not in lost and self._tree.find(*name) is None:
                self._tree.put(slot, block)
                self._tell(NoticeKind.STORED, name)
            else:
                self._tree.give_back(slot)
            if above is not None:
                self._let_go(above)

    def _let_go(self, slot: int) -> None:
        self._tree.let_go(slot)
        if not self._tree.is_held(slot) and not self._tree.has_block(slot):
            self._tree.give_back(slot)  # its block was dropped meanwhile

    def forget(self, block: BlockName) -> None:
        """Drop a block, and with it all that follow it."""
        slot = self._tree.find(*block)
        if slot is not None:
            for name in self._tree.drop(slot):
                self._tell(NoticeKind.REMOVED, name)

    def clear(self) -> None:
        """Offer nothing of moves that have not ended. What was written stays: it was checked, and
        belongs to the weights that its names say."""
        self._void.update(self._writing)

    def wipe(self) -> None:
        """Drop all blocks."""
        self.clear()
        self._touched.clear()
        self._tree.drop_all()
        self._tell(NoticeKind.CLEARED, None)

    def retire(self) -> None:
        """Hold nothing from now on: the weights are no longer those of the files."""
        self.clear()
        self._is_retired = True
        self._tell(NoticeKind.CLEARED, None)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def _tell(self, kind: NoticeKind, block: BlockName | None) -> None:
        notice = Notice(kind, "disk", block)
        for listener in self._listeners:
            listener(notice)

    def check_invariants(self) -> None:
        """EngineError unless the slots of blocks, of moves and free ones are all that there are."""
        writing = [slot for each in self._writing.values() for slot, _, _ in each.values()]
        reading = {slot for slots in self._reading.values() for slot in slots}
        above = {a for each in self._writing.values() for _, _, a in each.values() if a is not None}
        orphaned = [s for s in reading | above if not self._tree.has_block(s)]
        self._tree.check_invariants(len(writing) + len(orphaned))
