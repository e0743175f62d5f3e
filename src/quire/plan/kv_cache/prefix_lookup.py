"""Finds the longest cached prefix of a sequence that enters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.config.kv_layout import KVLayout
from quire.plan.kv_cache.notices import BlockName
from quire.plan.kv_cache.pool import BlockPool
from quire.plan.kv_cache.saved_tables import SavedTables

__all__ = ["PrefixHit", "PrefixLookup"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix.

    num_tokens: tokens that it covers; less than its blocks hold if the last one is that of a pinned
        prefix and partly filled.
    blocks: `blocks[g][i]` is block i of group g, or None where the group's window no longer
        reaches.
    checkpoint: checkpoint of the recurrent state after these tokens; None without tokens
        or without states.
    num_named: tokens up to which blocks have names, of a model with states; more than `num_tokens`
        if the state there is not kept.
    """

    num_tokens: int
    blocks: tuple[tuple[int | None, ...], ...]
    checkpoint: int | None = None
    num_named: int = 0


class NamedBlocks(Protocol):
    """Blocks by their names, per layer group."""

    def find(self, group: int, name: bytes) -> int | None: ...

    def find_run(self, group: int, names: Sequence[bytes]) -> list[int]:
        """Return the blocks of `names` up to the first that is not found."""
        ...


class NamedStates(Protocol):
    """Checkpoints of recurrent states by the names of the blocks that they follow."""

    def find(self, name: bytes) -> int | None: ...


class PrefixLookup:
    """Looks into named blocks, into states and into held sequences; changes nothing.

    A group needs the blocks that the query after the prefix reads, a recurrent model the state
    there. A prefix ends where each group has a whole block, unless a held sequence shares its
    partly filled one.
    """

    def __init__(
        self, named: NamedBlocks, pool: BlockPool, states: NamedStates | None, layout: KVLayout
    ) -> None:
        """named: index that finds blocks: the pool itself, or all that hold some. states: index
        that finds states in the same way; None if the model has none."""
        self._named = named
        self._pool = pool
        self._states = states
        self._groups = layout.groups
        self._full = [i for i, group in enumerate(layout.groups) if group.window is None]
        self._sliding = [i for i, group in enumerate(layout.groups) if group.window is not None]
        self._block_size = layout.block_size
        self._names_per_hit = layout.hit_tokens // layout.block_size
        self._names_per_block = [g.tokens_per_block // layout.block_size for g in layout.groups]

    def lookup(
        self, names: Sequence[bytes], max_tokens: int, held: SavedTables | None = None
    ) -> PrefixHit:
        """Return the longest prefix of at most `max_tokens` tokens that has all blocks
        every group needs.

        names: names of the sequence's full blocks, `block_size` tokens each. held: blocks of a held
        sequence that this one starts with. Its full blocks are there whatever they are called, so
        that a tenant's own blocks behind a prefix that all share are found; if there are none, its
        partly filled block is shared too, unless the model has states. A held state is there in the
        same way.
        """
        hit = self._of_full_blocks(names, max_tokens, held)
        if held is None or min(held.num_tokens, max_tokens) <= hit.num_tokens:
            return hit
        return hit if self._states is not None else self._of_held(held, max_tokens)

    def names_of(self, hit: PrefixHit, block: int, names: Sequence[bytes]) -> list[BlockName]:
        """Return what is called `block` in a hit, by the names of its full blocks."""
        return [
            (group, names[(index + 1) * step - 1])
            for group, (blocks, step) in enumerate(
                zip(hit.blocks, self._names_per_block, strict=True)
            )
            for index, each in enumerate(blocks)
            if each == block
        ]

    def num_blocks_to_enter(self, hit: PrefixHit, num_tokens: int) -> int:
        """Return how many available blocks are used up when a sequence enters with `hit` and grows
        to `num_tokens`: new blocks, blocks of the hit that nothing else uses, and the copy of a
        partly filled one."""
        count = 0
        for group, blocks in zip(self._groups, hit.blocks, strict=True):
            has_tail = hit.num_tokens % group.tokens_per_block != 0
            count += group.blocks_for(num_tokens) - len(blocks) + has_tail
            count += self._pool.num_unused(blocks)
        return count

    def _of_full_blocks(
        self, names: Sequence[bytes], max_tokens: int, held: SavedTables | None
    ) -> PrefixHit:
        given = self._full_blocks(held)
        limit = self._whole(min(len(names), max_tokens // self._block_size))
        runs: dict[int, list[int]] = {}
        for group in self._full:
            runs[group] = self._run(group, names, limit, given[group])
            limit = self._whole(len(runs[group]) * self._names_per_block[group])
        num_named = 0 if self._states is None else self._bound_of_windows(names, limit, given)
        while limit > 0:
            bound = self._bound_of_states(names, self._bound_of_windows(names, limit, given), held)
            if bound == limit:
                break
            limit = bound
        num_tokens = limit * self._block_size
        blocks = tuple(
            tuple(runs[index][: group.blocks_for(num_tokens)])
            if group.window is None
            else tuple(
                self._find(index, i, names, given)
                if i >= group.first_block_needed(num_tokens)
                else None
                for i in range(group.blocks_for(num_tokens))
            )
            for index, group in enumerate(self._groups)
        )
        checkpoint = self._checkpoint(names, limit, held)
        return PrefixHit(num_tokens, blocks, checkpoint, num_named * self._block_size)

    def _whole(self, num_names: int) -> int:
        """The largest length of a hit, in names, that is not above `num_names`."""
        return num_names - num_names % self._names_per_hit

    def _run(
        self, group: int, names: Sequence[bytes], limit: int, given: dict[int, int]
    ) -> list[int]:
        """The blocks of a full group from the first on, up to one that is missing."""
        step = self._names_per_block[group]
        start = list(given.values())[: limit // step]
        wanted = names[(len(start) + 1) * step - 1 : limit : step]
        return start + self._named.find_run(group, wanted)

    def _bound_of_windows(
        self, names: Sequence[bytes], num_names: int, given: Sequence[dict[int, int]]
    ) -> int:
        """The length, in names, above which no prefix of up to `num_names` has all that its sliding
        groups need. One of this length needs other blocks, so it is to be asked again."""
        num_tokens = num_names * self._block_size
        bound = num_names
        for index in self._sliding:
            group = self._groups[index]
            first = group.first_block_needed(num_tokens)
            for i in range(group.blocks_for(num_tokens) - 1, first - 1, -1):
                if self._find(index, i, names, given) is None:
                    bound = min(bound, self._whole(i * self._names_per_block[index]))
                    break
        return bound

    def _bound_of_states(
        self, names: Sequence[bytes], num_names: int, held: SavedTables | None
    ) -> int:
        """The longest prefix of up to `num_names` whose state is kept."""
        if self._states is None:
            return num_names
        lengths = range(num_names, 0, -self._names_per_hit)
        return next((n for n in lengths if self._checkpoint(names, n, held) is not None), 0)

    def _checkpoint(
        self, names: Sequence[bytes], num_names: int, held: SavedTables | None
    ) -> int | None:
        if self._states is None or not num_names:
            return None
        pinned = None if held is None else held.checkpoint
        if held is not None and num_names != self._whole(held.num_tokens // self._block_size):
            pinned = None
        return self._states.find(names[num_names - 1]) if pinned is None else pinned

    def _find(
        self, group: int, index: int, names: Sequence[bytes], given: Sequence[dict[int, int]]
    ) -> int | None:
        block = given[group].get(index)
        if block is not None:
            return block
        return self._named.find(group, names[(index + 1) * self._names_per_block[group] - 1])

    def _of_held(self, held: SavedTables, max_tokens: int) -> PrefixHit:
        """The first `max_tokens` tokens of a held sequence at most, the partly filled block too."""
        num_tokens = min(held.num_tokens, max_tokens)
        tables = zip(self._groups, held.first, held.blocks, strict=True)
        blocks = tuple(
            (*[None] * first, *blocks)[: group.blocks_for(num_tokens)]
            for group, first, blocks in tables
        )
        return PrefixHit(num_tokens, blocks)

    def _full_blocks(self, held: SavedTables | None) -> list[dict[int, int]]:
        """Per group, the full blocks of a held sequence by their index."""
        if held is None:
            return [{} for _ in self._groups]
        return [
            dict(zip(range(first, held.num_tokens // group.tokens_per_block), blocks, strict=False))
            for group, first, blocks in zip(self._groups, held.first, held.blocks, strict=True)
        ]
