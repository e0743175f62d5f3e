"""Blocks that are held by name beyond the device: found, loaded, and kept when evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from quire.plan.kv_cache.disk_index import DiskIndex
from quire.plan.kv_cache.notices import BlockName, Listener, Notice, NoticeKind
from quire.plan.kv_cache.pool import BlockPool, Evicted
from quire.plan.kv_cache.table_updates import UpdateLog
from quire.plan.kv_cache.transfers import Transfers
from quire.protocol.block_moves import BlockMove, MoveKind, MoveOutcome, SavedBlock

__all__ = ["ELSEWHERE", "BlockSource", "SourceTotals", "Sources"]

BLOCKS_PER_SAVE = 8
"""One in so many blocks of the device may be held for saves that have not ended."""

SAVE_SECONDS = 5.0
"""A save may hold its device blocks for so long."""

USES_PER_NOTE = 64
"""Blocks that prompts have used until their hits are written to the disk."""

ELSEWHERE = -1
"""Stands for a block that a source holds and the device does not."""


class BlockSource(Protocol):
    """Holds K/V of blocks under their names, in places of its own.

    It keeps the books and copies nothing. Plans name a copy by its tier and place; the data side
    makes it, and ends each ticket once. What a ticket reads or writes stays in its place until
    then.
    """

    @property
    def tier(self) -> int:
        """The number by which plans name its places."""
        ...

    def num_held(self, group: int, names: Sequence[bytes]) -> int:
        """Return how many of the first `names` of a layer group can be loaded."""
        ...

    def load(self, blocks: Sequence[BlockName], ticket: int) -> list[int]:
        """Return the places of blocks that are held."""
        ...

    def store(self, blocks: Sequence[BlockName], ticket: int) -> Mapping[BlockName, int]:
        """Return places for those of `blocks` that are to be copied. They can be loaded when the
        ticket has ended."""
        ...

    def end(self, ticket: int, lost: Collection[int]) -> None:
        """Take in that the copies of a ticket have ended. An unknown ticket is ignored. lost:
        places that a store did not fill."""
        ...

    def forget(self, block: BlockName) -> None:
        """Drop a block that turned out to be worth nothing, if it is held."""
        ...

    def clear(self) -> None:
        """Drop all blocks, also those of stores that have not ended."""
        ...

    def subscribe(self, listener: Listener) -> None:
        """Tell `listener` of each block that can be loaded from now on, or no longer."""
        ...


@dataclass(slots=True)
class SourceTotals:
    """Blocks since the start. stored, removed: blocks that sources stored and removed. loaded,
    lost: copies to the device that succeeded, and that failed. unstored: copies to
    sources that failed."""

    stored: int = 0
    removed: int = 0
    loaded: int = 0
    lost: int = 0
    unstored: int = 0

    def note(self, notice: Notice) -> None:
        """Count a notice of a source."""
        self.stored += notice.kind is NoticeKind.STORED
        self.removed += notice.kind is NoticeKind.REMOVED


class Sources:
    """Looks into the device's pool and all sources at once, as `PrefixLookup` does into the pool.

    A load fills fresh blocks, which are published when its ticket ends. What the pool evicts is
    offered to the sources in turn, unless it may still be retracted. A disk is written as blocks
    are computed instead, when their steps have ended well.

    beside: device blocks of moves to the disk and back, which no plan carries.
    """

    def __init__(
        self,
        pool: BlockPool,
        sources: Sequence[BlockSource],
        transfers: Transfers,
        updates: UpdateLog,
        ticket_numbers: Iterator[int],
        unsettled: Callable[[], Collection[int]],
        disk: DiskIndex | None = None,
        *,
        has_bytes: bool = True,
    ) -> None:
        """ticket_numbers: numbers for tickets that no group waits for. unsettled: returns blocks
        whose publication may still be retracted. disk: the last source. has_bytes: whether blocks
        hold anything. Those that do not are no more than names, which a disk need not keep: there
        is a block for each name that a state on the disk stands behind."""
        self._pool = pool
        self._disk = disk
        self.has_bytes = has_bytes
        self._sources: tuple[BlockSource, ...] = (*sources, *([] if disk is None else [disk]))
        self._transfers = transfers
        self._updates = updates
        self.ticket_numbers = ticket_numbers
        self._unsettled = unsettled
        self._loads: dict[int, dict[BlockName, int]] = {}  # device blocks, by ticket
        self._coming: dict[BlockName, int] = {}  # tickets of loads
        self._stores: dict[int, tuple[BlockSource, tuple[int, ...]]] = {}  # places, by ticket
        self.beside = Transfers(pool)
        self._moves: list[BlockMove] = []
        self._kinds: dict[int, tuple[MoveKind, int]] = {}  # and number of blocks, by ticket
        self._unsaved: deque[tuple[int, SavedBlock]] = deque(maxlen=pool.num_blocks)
        self._num_saving = 0
        self._deadlines: dict[int, float] = {}  # of saves, by ticket
        self._cancelled: set[int] = set()
        self._to_cancel: list[int] = []
        self.totals = SourceTotals()
        for source in self._sources:
            source.subscribe(self.totals.note)
        if sources:
            pool.offer_evicted(self._keep)

    def __bool__(self) -> bool:
        return bool(self._sources)

    def subscribe(self, listener: Listener) -> None:
        """Tell `listener` of the names that the device and each source have."""
        self._pool.subscribe(listener)
        for source in self._sources:
            source.subscribe(listener)

    # --- finding -------------------------------------------------------------------------------

    def find(self, group: int, name: bytes) -> int | None:
        """Return the device block of a name, `ELSEWHERE`, or None if nobody holds it."""
        block = self._pool.find(group, name)
        if block is None and self._num_held(group, [name]):
            return ELSEWHERE
        return block

    def find_run(self, group: int, names: Sequence[bytes]) -> list[int]:
        """Return what `find` does for each of `names` up to the first that nobody holds."""
        found = self._pool.find_run(group, names)
        while len(found) < len(names):
            rest = names[len(found) :]
            held = rest[: self._num_held(group, rest)]
            if not held:
                break
            here = [self._pool.find(group, name) for name in held]
            found += [ELSEWHERE if block is None else block for block in here]
            found += self._pool.find_run(group, names[len(found) :])
        return found

    def _num_held(self, group: int, names: Sequence[bytes]) -> int:
        if self._disk is not None and not self.has_bytes:
            return len(names) * self._disk.offers_loads
        return max((source.num_held(group, names) for source in self._sources), default=0)

    # --- loads ---------------------------------------------------------------------------------

    def ticket_of(self, block: BlockName) -> int | None:
        """Return the ticket of the load that brings a block, if one is under way."""
        return self._coming.get(block)

    def parts(self, wanted: Sequence[BlockName]) -> tuple[list[BlockName], list[BlockName]]:
        """Return blocks that are `ELSEWHERE` in two parts for `load`: blocks that the next plan
        copies, and blocks that the disk alone has."""
        nearer = [source for source in self._sources if source is not self._disk]
        near = [b for b in wanted if any(each.num_held(b[0], [b[1]]) for each in nearer)]
        known = set(near)
        return near, [block for block in wanted if block not in known]

    def load(self, wanted: Sequence[BlockName], kept: Sequence[int], ticket: int) -> None:
        """Start to copy one of `parts` into fresh device blocks, for which there is room. No other
        load brings them. kept: device blocks that are not evicted before the ticket ends."""
        self._pool.share(kept)
        if not self.has_bytes:
            self._load_names(wanted, kept, ticket)
            return
        rest = list(wanted)
        copies: list[tuple[int, int, BlockName]] = []
        for source in self._sources:  # before blocks are evicted, which takes places of sources
            own = [block for block in rest if source.num_held(block[0], [block[1]])]
            places = source.load(own, ticket) if own else []
            copies += [(source.tier, *pair) for pair in zip(places, own, strict=True)]
            rest = [block for block in rest if block not in own]
        blocks = self._pool.allocate_many(len(copies))
        names = [name for _, _, name in copies]
        self._loads[ticket] = dict(zip(names, blocks, strict=True))
        self._coming.update(dict.fromkeys(names, ticket))
        ended, disk = partial(self._loaded, ticket), self._disk
        if disk is not None and copies[0][0] == disk.tier:
            slots = [slot for _, slot, _ in copies]
            saved = tuple(map(disk.saved, slots, names))
            self.beside.start(ticket, [*blocks, *kept], ended)
            self.move(ticket, MoveKind.LOAD, blocks, slots, saved)
            return
        for (tier, place, _), block in zip(copies, blocks, strict=True):
            self._updates.load(ticket, tier, place, block)
        self._transfers.start(ticket, [*blocks, *kept], ended)

    def _load_names(self, wanted: Sequence[BlockName], kept: Sequence[int], ticket: int) -> None:
        """Let fresh blocks without bytes come with an empty move."""
        blocks = self._pool.allocate_many(len(wanted))
        self._loads[ticket] = dict(zip(wanted, blocks, strict=True))
        self._coming.update(dict.fromkeys(wanted, ticket))
        self.beside.start(ticket, [*blocks, *kept], partial(self._loaded, ticket))
        self.move(ticket, MoveKind.LOAD)

    def _loaded(self, ticket: int, lost: Collection[int]) -> None:
        """Publish the blocks of a load that arrived; whoever was to hold the others has not. Blocks
        behind a lost one are computed with it, so that all are saved again."""
        for source in self._sources:
            source.end(ticket, ())
        was_cancelled = self.ends_cancelled(ticket)
        is_cut: set[int] = set()  # groups
        for name, block in self._loads.pop(ticket).items():
            del self._coming[name]
            if was_cancelled:
                continue  # the disk has it, but is slow
            if block in lost:
                self.totals.lost += 1
                is_cut.add(name[0])
                for source in self._sources:
                    source.forget(name)
                continue
            self.totals.loaded += self.has_bytes
            if name[0] not in is_cut:
                self._pool.publish(block, *name)

    # --- the disk ------------------------------------------------------------------------------

    def seconds_to_load(self, num_blocks: int) -> float:
        """Return the seconds for so many blocks of the disk, as measured; 0.0 while unknown."""
        return 0.0 if self._disk is None else self._disk.seconds_to_load(num_blocks)

    def declined(self) -> None:
        """A load did not pay."""
        if self._disk is not None:
            self._disk.declined()

    def late(self, tickets: Collection[int]) -> None:
        """Nobody waits for these loads any longer. Loads from the disk give their blocks back."""
        for ticket in tickets:
            if ticket in self._kinds:
                self._cancel(ticket)

    def expire(self, now: float) -> None:
        """Cancel saves that were under way `SAVE_SECONDS` ago, and see what other processes have
        written. `now`: seconds."""
        if self._disk is not None:
            self._disk.look_again()
        for ticket, (kind, count) in list(self._kinds.items()):
            is_save = kind is MoveKind.SAVE and count > 0
            if is_save and self._deadlines.setdefault(ticket, now + SAVE_SECONDS) <= now:
                self._cancel(ticket)

    def _cancel(self, ticket: int) -> None:
        """Have a move end at once. The disk is used again when its thread has ended the call in
        which it hangs, and with it an empty move that follows."""
        if self._disk is None or ticket in self._cancelled:
            return
        kind, _ = self._kinds[ticket]
        self._cancelled.add(ticket)
        self._to_cancel.append(ticket)
        sign = next(self.ticket_numbers)
        self._disk.stall(kind, sign)
        self.move(sign, kind)

    def ends_cancelled(self, ticket: int) -> bool:
        """Return whether a move that ends has been cancelled."""
        self._deadlines.pop(ticket, None)
        was_cancelled = ticket in self._cancelled
        self._cancelled.discard(ticket)
        return was_cancelled

    def take_cancelled(self) -> list[int]:
        """Return tickets of moves to cancel, each of which was taken before; once."""
        waiting = {move.ticket for move in self._moves}
        taken = [ticket for ticket in self._to_cancel if ticket not in waiting]
        self._to_cancel = [ticket for ticket in self._to_cancel if ticket in waiting]
        return taken

    def touch(self, group: int, names: Sequence[bytes]) -> None:
        """Note a use of blocks, wherever they are."""
        if self._disk is not None:
            self._disk.touch([(group, name) for name in names])

    def note_uses(self, at_least: int = USES_PER_NOTE) -> None:
        """Write the hits of blocks that were used to the disk, if there are `at_least` so many."""
        noted = {} if self._disk is None else self._disk.take_touched(at_least)
        if noted:
            ticket = next(self.ticket_numbers)
            self.move(ticket, MoveKind.NOTE, (), list(noted), tuple(noted.values()))

    def guard(self, names: Sequence[bytes]) -> None:
        """Keep blocks of these names on the disk before all others, until `unguard`."""
        if self._disk is not None:
            self._disk.guard(names)

    def unguard(self, names: Sequence[bytes]) -> None:
        """Take one `guard` of these names back."""
        if self._disk is not None:
            self._disk.unguard(names)

    @property
    def takes_settled(self) -> bool:
        """True if `settled` is to be told of blocks."""
        return self._disk is not None and self._disk.takes_more and self.has_bytes

    def settled(self, blocks: Sequence[tuple[int, SavedBlock]]) -> None:
        """Save blocks that are published for good, as far as the disk wants them."""
        self._unsaved.extend(blocks)
        self._save()

    def _save(self) -> None:
        """Start saves of what waits and is still there, within the share of the device's blocks
        that they may hold."""
        disk, room = self._disk, max(1, self._pool.num_blocks // BLOCKS_PER_SAVE) - self._num_saving
        batch: list[tuple[int, SavedBlock]] = []
        while self._unsaved and len(batch) < room:
            block, saved = self._unsaved.popleft()
            if self._pool.find(saved.group, saved.name) == block:
                batch.append((block, saved))
        if disk is None or not batch:
            return
        ticket = next(self.ticket_numbers)
        taken = disk.save([saved for _, saved in batch], ticket)
        if not taken:
            return
        blocks = [batch[index][0] for index in taken]
        slots, names = zip(*taken.values(), strict=True)
        self._pool.share(blocks)
        self._num_saving += len(blocks)
        self.beside.start(ticket, blocks[::-1], partial(self._saved, ticket, len(blocks)))
        self.move(ticket, MoveKind.SAVE, blocks, slots, names)

    def _saved(self, ticket: int, count: int, lost: Collection[int]) -> None:
        self._num_saving -= count
        self.end_save(ticket, lost)

    def end_save(self, ticket: int, lost: Collection[int]) -> None:
        """Take in that a save has ended. lost: slots that it did not fill."""
        assert self._disk is not None, "it has saved"
        self.ends_cancelled(ticket)
        self.totals.unstored += len(lost)
        self._disk.end(ticket, lost)

    def move(
        self,
        ticket: int,
        kind: MoveKind,
        blocks: Sequence[int] = (),
        slots: Sequence[int] = (),
        names: tuple[SavedBlock, ...] = (),
    ) -> None:
        """Start a move after the plans made so far."""
        self._kinds[ticket] = (kind, len(blocks))
        places = np.array(slots, np.int32)
        self._moves.append(BlockMove(ticket, kind, np.array(blocks, np.int32), places, names))

    def take_moves(self) -> list[BlockMove]:
        """Return the moves to start after the plans made so far, once. `moved` follows for each."""
        moves, self._moves = self._moves, []
        return moves

    def lose_moves(self) -> list[BlockMove]:
        """Return the moves that nobody took, which start no more: their device blocks are lost.
        `moved` follows for each. The disk is cleared all the same."""
        moves = self.take_moves()
        self._moves = [move for move in moves if move.kind is MoveKind.CLEAR]
        return [move for move in moves if move.kind is not MoveKind.CLEAR]

    @property
    def has_moves(self) -> bool:
        """True if there are moves to start."""
        return bool(self._moves)

    def moved(self, ticket: int, outcome: MoveOutcome) -> None:
        """Learn from a move that has ended; `end` of its ticket follows."""
        kind, count = self._kinds.pop(ticket)
        if self._disk is not None:
            self._disk.end_move(kind, outcome, count)
            if not count:
                self._disk.end(ticket, ())

    def save_more(self) -> None:
        """Go on with what waits to be saved."""
        if self._unsaved:
            self._save()

    def wipe(self) -> None:
        """Drop what the disk holds, for good."""
        if self._disk is not None:
            self._disk.wipe()
            if self._disk.takes_more:
                self.move(next(self.ticket_numbers), MoveKind.CLEAR)

    def retire(self) -> None:
        """The weights have changed: the disk has none of them."""
        if self._disk is not None:
            self._disk.retire()

    # --- stores --------------------------------------------------------------------------------

    def _keep(self, evicted: Evicted) -> None:
        """Offer evicted blocks to the sources. The next plan copies them before it writes any."""
        unsettled = self._unsettled()
        rest = [(block, name) for block, name in evicted if block not in unsettled]
        for source in self._sources:
            if rest and source is not self._disk:
                rest = self._offer(source, rest)

    def _offer(self, source: BlockSource, blocks: Evicted) -> Evicted:
        """Let a source take what it wants of evicted blocks; return those that it does not hold."""
        ticket = next(self.ticket_numbers)
        places = source.store([name for _, name in blocks], ticket)
        for block, name in blocks:
            if name in places:
                self._updates.store(block, source.tier, places[name], ticket)
        if places:
            self._stores[ticket] = (source, tuple(places.values()))
        lacking = [each for each in blocks if each[1] not in places]
        return [each for each in lacking if not source.num_held(each[1][0], [each[1][1]])]

    def end(self, ticket: int, lost: Collection[int]) -> None:
        """Take in that the copies of a store have ended; other tickets are ignored. lost: places
        that were not filled."""
        found = self._stores.pop(ticket, None)
        if found is not None:
            self.totals.unstored += len(lost)
            found[0].end(ticket, lost)

    def lose_stores(self) -> None:
        """No store that has not ended counts any more, nor one that no plan carries yet."""
        for ticket, (source, places) in list(self._stores.items()):
            self._updates.forget_stores(source.tier, set(places))
            self.end(ticket, places)

    def clear(self) -> None:
        """Drop everything that sources hold in memory, and publish nothing of loads that have not
        ended."""
        self._coming.clear()
        self._unsaved.clear()
        for names in self._loads.values():
            names.clear()
        for source in self._sources:
            source.clear()
