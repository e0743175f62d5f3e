"""A source of K/V that takes what it likes and drops it when it likes, and a subscriber."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from quire.plan.kv_cache import KVManager
from quire.plan.kv_cache.notices import BlockName, Listener, Notice, NoticeKind

__all__ = ["FakeSource", "NameMirror"]


class FakeSource:
    """Places in no order. `check` finds a place that is written while it is read."""

    def __init__(self, tier: int, num_places: int, refusals: float = 0.0, seed: int = 0) -> None:
        """refusals: share of blocks that are not taken, and of calls that drop one."""
        self.tier = tier
        self._free = list(range(num_places))
        self._refusals = refusals
        self._rng = random.Random(seed)
        self.held: dict[BlockName, int] = {}
        self._reading: dict[int, list[int]] = {}
        self._writing: dict[int, dict[BlockName, int]] = {}
        self._void: set[int] = set()
        self._leaving: set[int] = set()  # places that are read, under no name any more
        self._listeners: list[Listener] = []

    def num_held(self, group: int, names: Sequence[bytes]) -> int:
        count = 0
        while count < len(names) and (group, names[count]) in self.held:
            count += 1
        return count

    def load(self, blocks: Sequence[BlockName], ticket: int) -> list[int]:
        self._reading[ticket] = [self.held[block] for block in blocks]
        return list(self._reading[ticket])

    def store(self, blocks: Sequence[BlockName], ticket: int) -> Mapping[BlockName, int]:
        coming = {name for writing in self._writing.values() for name in writing}
        places: dict[BlockName, int] = {}
        for block in blocks:
            if block in self.held or block in coming or self._rng.random() < self._refusals:
                continue
            if not self._free:
                self._drop_one()
            if self._free:
                places[block] = self._free.pop(self._rng.randrange(len(self._free)))
        if places:
            self._writing[ticket] = places
        return places

    def end(self, ticket: int, lost: Collection[int]) -> None:
        self._reading.pop(ticket, None)
        for block, place in self._writing.pop(ticket, {}).items():
            if place in lost or ticket in self._void:
                self._free.append(place)
            else:
                self.held[block] = place
                self._tell(NoticeKind.STORED, block)
        self._void.discard(ticket)
        read = self._read
        self._free += self._leaving - read
        self._leaving &= read
        if self._rng.random() < self._refusals:
            self._drop_one()

    def forget(self, block: BlockName) -> None:
        if block in self.held:
            self._give_back(self.held.pop(block))
            self._tell(NoticeKind.REMOVED, block)

    def clear(self) -> None:
        self._void.update(self._writing)
        for place in self.held.values():
            self._give_back(place)
        self.held.clear()
        self._tell(NoticeKind.CLEARED, None)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    @property
    def _read(self) -> set[int]:
        return {place for places in self._reading.values() for place in places}

    def _give_back(self, place: int) -> None:
        if place in self._read:
            self._leaving.add(place)
        else:
            self._free.append(place)

    def _drop_one(self) -> None:
        read = self._read
        idle = [block for block, place in self.held.items() if place not in read]
        if idle:
            self.forget(self._rng.choice(idle))

    def _tell(self, kind: NoticeKind, block: BlockName | None) -> None:
        for listener in self._listeners:
            listener(Notice(kind, "fake", block))


class NameMirror:
    """Block names that each holder has, according to notices."""

    def __init__(self) -> None:
        self.names: dict[str, set[BlockName]] = {}
        self.kinds = Counter[NoticeKind]()

    def take(self, notice: Notice) -> None:
        self.kinds[notice.kind] += 1
        names = self.names.setdefault(notice.medium, set())
        if notice.block is None:
            names.clear()
        elif notice.kind is NoticeKind.STORED:
            assert notice.block not in names, "a block came twice"
            names.add(notice.block)
        else:
            names.remove(notice.block)

    def check(self, kv: KVManager) -> None:
        """The device and the host have the names that they have told of, and no others."""
        for medium, pool in (("device", kv.pool), ("host", kv.host._pool)):
            if medium in self.names:
                found = {(g, name) for g, index in enumerate(pool._index) for name in index}
                assert self.names[medium] == found, f"notices of the {medium} are wrong"
