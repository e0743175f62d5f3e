"""K/V in host memory: sequences that wait there, and evicted blocks under their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from quire.base.errors import EngineError
from quire.plan.kv_cache.notices import BlockName, Listener
from quire.plan.kv_cache.pool import BlockPool
from quire.plan.kv_cache.saved_tables import SavedTables
from quire.protocol.step import HOST_TIER

__all__ = ["HostTier"]


class HostTier:
    """Host blocks, in two uses.

    Those of swapped sequences have the reference counts of the device blocks that they stand for,
    so that what sequences of a group share is kept once (Kwon et al. 2023, section 4.5). The others
    hold evicted blocks under their names, as a `BlockSource`: the least recently used ones go when
    sequences or later blocks need room.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        """num_groups: number of layer groups."""
        self._pool = BlockPool(num_blocks, num_groups, "host")
        self._tables: set[SavedTables] = set()
        self._held = Counter[int]()  # of copies that have not ended
        self._reading: dict[int, list[int]] = {}
        self._writing: dict[int, dict[BlockName, int]] = {}
        self._not_wanted: set[int] = set()  # tickets of stores before everything was dropped

    @property
    def tier(self) -> int:
        return HOST_TIER

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks of sequences."""
        held = self._held.items()
        only_held = sum(count > 0 and self._pool.ref_count(b) == count for b, count in held)
        return self._pool.num_used - only_held

    @property
    def num_named(self) -> int:
        """Blocks that nothing else uses, held under their names."""
        return self._pool.num_cached

    # --- swapped sequences ---------------------------------------------------------------------

    def has_room(self, count: int) -> bool:
        return count <= self._pool.num_available

    def save(
        self,
        num_tokens: list[int],
        tables: list[list[tuple[int, list[int]]]],
        checkpoints: Sequence[int | None],
    ) -> tuple[list[SavedTables], dict[int, int]]:
        """Host blocks for sequences given by their tokens, per group first index and device blocks,
        and the checkpoints of their states. What stands for them, and the host block of each device
        block. There is room."""
        place: dict[int, int] = {}
        saved: list[SavedTables] = []
        for tokens, groups, state in zip(num_tokens, tables, checkpoints, strict=True):
            for block in (block for _, blocks in groups for block in blocks):
                if block in place:
                    self._pool.share([place[block]])
                else:
                    place[block] = self._pool.allocate()
            first = tuple(first for first, _ in groups)
            blocks = tuple(tuple(place[block] for block in blocks) for _, blocks in groups)
            saved.append(SavedTables(tokens, first, blocks, state))
        self._tables.update(saved)
        return saved, place

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

    # --- named blocks --------------------------------------------------------------------------

    def num_held(self, group: int, names: Sequence[bytes]) -> int:
        return len(self._pool.find_run(group, names))

    def load(self, blocks: Sequence[BlockName], ticket: int) -> list[int]:
        places = [place for name in blocks if (place := self._pool.find(*name)) is not None]
        self.hold(places)
        self._reading[ticket] = places
        return places

    def store(self, blocks: Sequence[BlockName], ticket: int) -> Mapping[BlockName, int]:
        """Return places as in `BlockSource`. Blocks that are held become the most recently used."""
        coming = {name for writing in self._writing.values() for name in writing}
        lacking: list[BlockName] = []
        for name in blocks:
            place = self._pool.find(*name)
            if place is not None:
                self._pool.share([place])
                self._pool.release(place)
            elif name not in coming:
                lacking.append(name)
        lacking = lacking[: self._pool.num_available]
        places = dict(zip(lacking, self._pool.allocate_many(len(lacking)), strict=True))
        if places:
            self._held.update(places.values())
            self._writing[ticket] = places
        return places

    def end(self, ticket: int, lost: Collection[int]) -> None:
        self.let_go(self._reading.pop(ticket, []))
        written = self._writing.pop(ticket, {})
        is_wanted = ticket not in self._not_wanted
        self._not_wanted.discard(ticket)
        for name, place in written.items():
            if is_wanted and place not in lost:
                self._pool.publish(place, *name)
        self.let_go(list(written.values()))

    def forget(self, block: BlockName) -> None:
        place = self._pool.find(*block)
        if place is not None:
            self._pool.retract(place, block[1])

    def clear(self) -> None:
        self._pool.drop_cached()
        self._not_wanted.update(self._writing)

    def subscribe(self, listener: Listener) -> None:
        self._pool.subscribe(listener)

    def check_invariants(self) -> None:
        """EngineError unless references equal what swapped sequences and pending copies name."""
        references = Counter(self._held)
        for swapped in self._tables:
            references.update(swapped.all_blocks())
        self._pool.check_invariants(references)
        of_copies = [*self._reading.values(), *(list(w.values()) for w in self._writing.values())]
        if not Counter(place for places in of_copies for place in places) <= self._held:
            raise EngineError("a host block is copied that nothing holds")
