"""Blocks that are held by name beyond the device: found, loaded, and kept when evicted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from quire.kv_cache.notices import BlockName, Listener, Notice, NoticeKind
from quire.kv_cache.pool import BlockPool, Evicted
from quire.kv_cache.table_updates import UpdateLog
from quire.kv_cache.transfers import Transfers

__all__ = ["ELSEWHERE", "BlockSource", "SourceTotals", "Sources"]

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
    offered to the sources in turn, unless it may still be retracted.
    """

    def __init__(
        self,
        pool: BlockPool,
        sources: Sequence[BlockSource],
        transfers: Transfers,
        updates: UpdateLog,
        ticket_numbers: Iterator[int],
        unsettled: Callable[[], Collection[int]],
    ) -> None:
        """ticket_numbers: numbers for tickets that no group waits for. unsettled: returns blocks
        whose publication may still be retracted."""
        self._pool = pool
        self._sources = tuple(sources)
        self._transfers = transfers
        self._updates = updates
        self._ticket_numbers = ticket_numbers
        self._unsettled = unsettled
        self._loads: dict[int, dict[BlockName, int]] = {}  # device blocks, by ticket
        self._coming: dict[BlockName, int] = {}  # tickets of loads
        self._stores: dict[int, tuple[BlockSource, tuple[int, ...]]] = {}  # places, by ticket
        self.totals = SourceTotals()
        for source in self._sources:
            source.subscribe(self.totals.note)
        if self._sources:
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
        return max((source.num_held(group, names) for source in self._sources), default=0)

    # --- loads ---------------------------------------------------------------------------------

    def ticket_of(self, block: BlockName) -> int | None:
        """Return the ticket of the load that brings a block, if one is under way."""
        return self._coming.get(block)

    def load(self, wanted: Sequence[BlockName], kept: Sequence[int], ticket: int) -> None:
        """Start to copy blocks that are `ELSEWHERE` into fresh device blocks, for which there is
        room. No other load brings them. kept: device blocks that are not evicted before the ticket
        ends."""
        self._pool.share(kept)
        rest = list(wanted)
        copies: list[tuple[int, int, BlockName]] = []
        for source in self._sources:  # before blocks are evicted, which takes places of sources
            own = [block for block in rest if source.num_held(block[0], [block[1]])]
            places = source.load(own, ticket) if own else []
            copies += [(source.tier, *pair) for pair in zip(places, own, strict=True)]
            rest = [block for block in rest if block not in own]
        blocks = self._pool.allocate_many(len(copies))
        for (tier, place, _), block in zip(copies, blocks, strict=True):
            self._updates.load(ticket, tier, place, block)
        names = [name for _, _, name in copies]
        self._loads[ticket] = dict(zip(names, blocks, strict=True))
        self._coming.update(dict.fromkeys(names, ticket))
        self._transfers.start(ticket, [*blocks, *kept], partial(self._loaded, ticket))

    def _loaded(self, ticket: int, lost: Collection[int]) -> None:
        """Publish the blocks of a load that arrived; whoever was to hold the others has not."""
        for source in self._sources:
            source.end(ticket, ())
        for name, block in self._loads.pop(ticket).items():
            del self._coming[name]
            if block in lost:
                self.totals.lost += 1
                for source in self._sources:
                    source.forget(name)
            else:
                self.totals.loaded += 1
                self._pool.publish(block, *name)

    # --- stores --------------------------------------------------------------------------------

    def _keep(self, evicted: Evicted) -> None:
        """Offer evicted blocks to the sources. The next plan copies them before it writes any."""
        unsettled = self._unsettled()
        rest = [(block, name) for block, name in evicted if block not in unsettled]
        for source in self._sources:
            if rest:
                rest = self._offer(source, rest)

    def _offer(self, source: BlockSource, blocks: Evicted) -> Evicted:
        """Let a source take what it wants of evicted blocks; return those that it does not hold."""
        ticket = next(self._ticket_numbers)
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
        """Drop everything that sources hold, and publish nothing of loads that have not ended."""
        self._coming.clear()
        for names in self._loads.values():
            names.clear()
        for source in self._sources:
            source.clear()
