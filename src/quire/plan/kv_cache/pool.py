"""Physical blocks: free ones, shared ones, and ones that hold cached tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from quire.base.errors import EngineError
from quire.plan.kv_cache.notices import BlockName, Listener, Notice, NoticeKind

__all__ = ["BlockPool", "Evicted"]

MAX_LAST_EVICTED = 1024

MAX_EVICTED_NAMES = 16_384
"""Names of evicted blocks that are remembered, and at most twice as many."""

Evicted = list[tuple[int, BlockName]]
"""Blocks that are given to others, each with the name that it had. Their K/V are still there when
the next plan begins."""


class BlockPool:
    """Blocks `0 … num_blocks - 1`, each in exactly one of three states.

    used: referenced by at least one table. cached: referenced by none, but published under a name,
    so a later prompt can take it back; evicted least recently used first. free: neither.
    """

    def __init__(self, num_blocks: int, num_groups: int, medium: str = "device") -> None:
        """medium: place of the blocks, for notices."""
        self.num_blocks = num_blocks
        self._medium = medium
        self._listeners: list[Listener] = []
        self._on_eviction: Callable[[Evicted], None] | None = None
        self._ref_count = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # insertion order is LRU order
        self._name: list[BlockName | None] = [None] * num_blocks
        self._index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._last_evicted: deque[int] = deque(maxlen=MAX_LAST_EVICTED)
        self.evicted_total = 0
        self._evicted_names: tuple[set[BlockName], set[BlockName]] = set(), set()  # newer, older

    def subscribe(self, listener: Listener) -> None:
        """Tell `listener` of each name that blocks get and lose."""
        self._listeners.append(listener)

    def offer_evicted(self, on_eviction: Callable[[Evicted], None]) -> None:
        """Call `on_eviction` with what `allocate_many` evicts, before it returns."""
        self._on_eviction = on_eviction

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def states(self) -> bytearray:
        """Return a letter for each block: f free, c cached, u used by one table, s by several."""
        counts = np.minimum(np.array(self._ref_count, np.int64), 2)
        letters = np.frombuffer(b"fus", np.uint8)[counts]
        letters[list(self._cached)] = ord("c")
        return bytearray(letters.tobytes())

    def last_evicted(self, count: int) -> tuple[int, ...]:
        """Return the last `count` blocks that were evicted, newest first, each once; no more than
        `MAX_LAST_EVICTED`."""
        return tuple(dict.fromkeys(islice(reversed(self._last_evicted), count)))

    def was_evicted(self, name: BlockName) -> bool:
        """Return whether a block of this name was evicted lately."""
        return any(name in names for names in self._evicted_names)

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def allocate(self) -> int:
        """A block with one reference and no content. The caller knows that one is available."""
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        """`count` such blocks: free ones, and then the least recently used cached ones."""
        if count > self.num_available:
            raise EngineError(
                f"{count} more KV blocks are wanted, but only {self.num_available} of "
                f"{self.num_blocks} are not in use: the scheduler must check num_available "
                "before it allocates"
            )
        kept = max(len(self._free) - count, 0)
        blocks = self._free[kept:]
        del self._free[kept:]
        blocks.reverse()
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            self._ref_count[block] = 1
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Take the `count` least recently used cached blocks, without their names."""
        blocks = list(islice(self._cached, count))
        names = [self._name[block] for block in blocks]
        self._last_evicted.extend(blocks)
        self.evicted_total += count
        for block in blocks:
            del self._cached[block]
            self._forget(block)
        newer = self._evicted_names[0]
        newer.update(name for name in names if name is not None)
        if len(newer) > MAX_EVICTED_NAMES:
            self._evicted_names = set(), newer
        if self._on_eviction is not None:
            pairs = zip(blocks, names, strict=True)
            self._on_eviction([(block, name) for block, name in pairs if name is not None])
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each; cached blocks become used again."""
        for block in blocks:
            if self._ref_count[block] == 0:
                del self._cached[block]
            self._ref_count[block] += 1

    def num_unused(self, blocks: Iterable[int | None]) -> int:
        """Count the blocks without an owner."""
        return sum(self._ref_count[block] == 0 for block in blocks if block is not None)

    def release(self, block: int) -> None:
        """One reference less; the last one makes the block cached if it has a name, else free."""
        self._ref_count[block] -= 1
        if self._ref_count[block] == 0:
            if self._name[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def publish(self, block: int, group: int, name: bytes) -> bool:
        """Let others find a used block by its content. The first block of a name stays its one:
        False if this block was not needed."""
        if self._name[block] is not None or name in self._index[group]:
            return False
        self._index[group][name] = block
        self._name[block] = (group, name)
        if self._listeners:
            self._tell(NoticeKind.STORED, (group, name))
        return True

    def find(self, group: int, name: bytes) -> int | None:
        return self._index[group].get(name)

    def find_run(self, group: int, names: Iterable[bytes]) -> list[int]:
        """Return the blocks of `names` up to the first name that is not published."""
        blocks: list[int] = []
        for found in map(self._index[group].get, names):
            if found is None:
                break
            blocks.append(found)
        return blocks

    def retract(self, block: int, name: bytes) -> None:
        """Unpublish a block, if it still has this name."""
        named = self._name[block]
        if named is None or named[1] != name:
            return
        self._forget(block)
        if self._ref_count[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def drop_cached(self) -> None:
        """Forget every name: after a change of weights nothing cached is true any more."""
        self._evicted_names = set(), set()
        self._name = [None] * self.num_blocks
        for index in self._index:
            index.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        if self._listeners:
            self._tell(NoticeKind.CLEARED, None)

    def _forget(self, block: int) -> None:
        named = self._name[block]
        if named is not None:
            del self._index[named[0]][named[1]]
            self._name[block] = None
            if self._listeners:
                self._tell(NoticeKind.REMOVED, named)

    def _tell(self, kind: NoticeKind, block: BlockName | None) -> None:
        notice = Notice(kind, self._medium, block)
        for listener in self._listeners:
            listener(notice)

    def check_invariants(self, references: dict[int, int]) -> None:
        """Raise EngineError unless the bookkeeping agrees with `references`, block → owners."""
        free = set(self._free)
        faults: list[str] = []
        if len(free) != len(self._free):
            faults.append("a block is twice in the free list")
        if free & self._cached.keys():
            faults.append("a block is both free and cached")
        for block in range(self.num_blocks):
            count = self._ref_count[block]
            if count != references.get(block, 0):
                faults.append(f"block {block}: {count} counted, {references.get(block, 0)} held")
            if (count == 0) != (block in free or block in self._cached):
                faults.append(f"block {block}: {count} references but free or cached is wrong")
            named = self._name[block]
            if block in free and named is not None:
                faults.append(f"free block {block} still has a name")
            if named is not None and self._index[named[0]].get(named[1]) != block:
                faults.append(f"block {block} is not found under its own name")
        if sum(len(index) for index in self._index) != sum(n is not None for n in self._name):
            faults.append("the index names blocks that do not know it")
        if faults:
            raise EngineError("KV block bookkeeping is broken: " + "; ".join(faults[:5]))
