"""Moves sequences between the device's blocks and the host's (Kwon et al. 2023, section 4.5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.config.kv_layout import KVGroup
from quire.kv_cache.block_tables import BlockTables
from quire.kv_cache.host_tier import HostTier
from quire.kv_cache.pool import BlockPool
from quire.kv_cache.saved_tables import SavedTables
from quire.kv_cache.table_updates import UpdateLog

__all__ = ["Swaps"]

Slots = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Transfer:
    """Copies to the device under one ticket: host blocks and device blocks. It owns the blocks,
    beside their other owners, until the copies end."""

    host: list[int] = field(default_factory=list[int])
    device: list[int] = field(default_factory=list[int])


class Swaps:
    """Copies are recorded in `updates`, and made by the plan that carries them. Those to the
    device have ended when their ticket has, in whatever step that is."""

    def __init__(
        self,
        tables: BlockTables,
        block_size: int,
        pool: BlockPool,
        host: HostTier,
        updates: UpdateLog,
    ) -> None:
        """block_size: tokens that one name of a chain stands for."""
        self._tables = tables
        self._block_size = block_size
        self._pool = pool
        self._host = host
        self._updates = updates
        self._transfers: dict[int, _Transfer] = {}

    def swap_out(self, slots: Slots, num_tokens: Slots) -> list[SavedTables] | None:
        """Copy to the host what `slots` hold of their first `num_tokens` [R] tokens; they are still
        to be freed. None, and nothing happens, if the host has no room for all of it."""
        tables = [
            self._tables.held_of_prefix(slot, count, count)
            for slot, count in zip(slots.tolist(), num_tokens.tolist(), strict=True)
        ]
        distinct = {block for groups in tables for _, blocks in groups for block in blocks}
        awaits_copy = not distinct.isdisjoint(self._updates.pending.copy_dst)  # made after the swap
        if awaits_copy or not self._host.has_room(len(distinct)):
            return None
        stored, place = self._host.store(num_tokens.tolist(), tables)
        self._updates.swap_out(place)
        return stored

    def num_blocks_to_swap_in(self, swapped: Sequence[SavedTables], ends: Sequence[int]) -> int:
        """Available blocks that go at most when these sequences come back, and grow to `ends`."""
        whole: set[int] = set()
        count = 0
        for tables, end in zip(swapped, ends, strict=True):
            rows = zip(self._tables.groups, tables.first, tables.blocks, strict=True)
            for group, first, blocks in rows:
                num_full = max(_num_full(tables, group) - first, 0)
                whole.update(blocks[:num_full])
                count += len(blocks[num_full:])
                count += group.blocks_for(end) - group.blocks_for(tables.num_tokens)
        return count + len(whole)

    def swap_in(
        self,
        slots: Sequence[int],
        swapped: Sequence[SavedTables],
        names: Sequence[list[bytes]],
        ticket: int,
    ) -> bool:
        """Start the tables of empty slots with what the host has of them. Full blocks that they
        shared they share again; one that the cache still has under its name is not copied. Whether
        there is anything to copy: then it is there when `ticket` is done, and what the host has is
        to be kept until then."""
        transfer = _Transfer()
        placed: dict[int, int] = {}
        for slot, tables, chain in zip(slots, swapped, names, strict=True):
            for index, group in enumerate(self._tables.groups):
                first, num_full = tables.first[index], _num_full(tables, group)
                step = group.tokens_per_block // self._block_size
                row = [
                    self._fetch(
                        transfer, index, host, placed, chain[(i + 1) * step - 1 : (i + 1) * step]
                    )
                    if i < num_full
                    else self._copy_in(transfer, host)
                    for i, host in enumerate(tables.blocks[index], first)
                ]
                self._tables.start(slot, index, first, row)
        if not transfer.device:
            return False
        self._host.hold(transfer.host)
        self._pool.share(transfer.device)
        self._transfers[ticket] = transfer
        for host, block in zip(transfer.host, transfer.device, strict=True):
            self._updates.swap_in(ticket, host, block)
        return True

    def end(self, ticket: int) -> None:
        """The copies under this ticket have ended; one that is not known is ignored."""
        transfer = self._transfers.pop(ticket, None)
        if transfer is not None:
            self._host.let_go(transfer.host)
            for block in transfer.device:
                self._pool.release(block)

    def lose_all(self) -> None:
        """No copy to the device that was started counts any more."""
        for ticket in list(self._transfers):
            self.end(ticket)

    @property
    def are_under_way(self) -> bool:
        """True if copies to the device have not ended."""
        return bool(self._transfers)

    @property
    def are_to_start(self) -> bool:
        """True if there are copies to the device that no plan carries yet."""
        return bool(self._updates.pending.swap_in_dst)

    @property
    def num_orphaned(self) -> int:
        """Return the number of device blocks that only running copies hold."""
        return sum(self._pool.ref_count(block) == 1 for block in self.held_blocks())

    def held_blocks(self) -> Iterator[int]:
        """Device blocks of copies that have not ended."""
        for transfer in self._transfers.values():
            yield from transfer.device

    def discard(self, swapped: SavedTables) -> None:
        """Drop this sequence's K/V on the host."""
        self._updates.forget_swaps_out(set(self._host.release(swapped)))

    def _fetch(
        self,
        transfer: _Transfer,
        group: int,
        host: int,
        placed: dict[int, int],
        name: list[bytes],
    ) -> int:
        """The device block of a full host block, one reference more to it."""
        block = placed.get(host)
        if block is None and name:
            block = self._pool.find(group, name[0])
        if block is None:
            block = self._copy_in(transfer, host)
        else:
            self._pool.share([block])
        placed[host] = block
        return block

    def _copy_in(self, transfer: _Transfer, host: int) -> int:
        block = self._pool.allocate()
        transfer.host.append(host)
        transfer.device.append(block)
        return block


def _num_full(swapped: SavedTables, group: KVGroup) -> int:
    """Return the blocks of a group that nothing writes any more. A partly filled block is not
    shared after a swap, because each of its owners is about to write into it."""
    return swapped.num_tokens // group.tokens_per_block
