"""Moves sequences between the device's blocks and the host's (Kwon et al. 2023, section 4.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.config.kv_layout import KVGroup
from quire.plan.kv_cache.block_tables import BlockTables
from quire.plan.kv_cache.host_tier import HostTier
from quire.plan.kv_cache.pool import BlockPool
from quire.plan.kv_cache.saved_tables import SavedTables
from quire.plan.kv_cache.state_pool import StatePool
from quire.plan.kv_cache.table_updates import UpdateLog
from quire.plan.kv_cache.transfers import Transfers
from quire.protocol.step import HOST_TIER

__all__ = ["Swaps"]

Slots = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Copies:
    """Copies to the device under one ticket: host blocks, and the device blocks that they fill."""

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
        transfers: Transfers,
        states: StatePool | None,
    ) -> None:
        """block_size: tokens that one name of a chain stands for. states: checkpoints of recurrent
        states; None if the model has none."""
        self._tables = tables
        self._block_size = block_size
        self._pool = pool
        self._host = host
        self._updates = updates
        self._transfers = transfers
        self._states = states

    def swap_out(self, slots: Slots, num_tokens: Slots) -> list[SavedTables] | None:
        """Copy to the host what `slots` hold of their first `num_tokens` [R] tokens; they are still
        to be freed. Recurrent states, which are those after so many tokens, go to checkpoints.
        None, and nothing happens, if there is no room for all of it."""
        tables = [
            self._tables.held_of_prefix(slot, count, count)
            for slot, count in zip(slots.tolist(), num_tokens.tolist(), strict=True)
        ]
        distinct = {block for groups in tables for _, blocks in groups for block in blocks}
        awaits_copy = not distinct.isdisjoint(self._updates.pending.copy_dst)  # made after the swap
        if awaits_copy or not self._host.has_room(len(distinct)):
            return None
        checkpoints = self._stash(slots)
        if checkpoints is None:
            return None
        stored, place = self._host.save(num_tokens.tolist(), tables, checkpoints)
        for block, host in place.items():
            self._updates.store(block, HOST_TIER, host)
        return stored

    def _stash(self, slots: Slots) -> Sequence[int | None] | None:
        """Keep the states of slots that leave; None if there are too few checkpoints."""
        if self._states is None:
            return [None] * len(slots)
        checkpoints = self._states.stash(len(slots))
        for slot, checkpoint in zip(slots.tolist(), checkpoints or (), strict=False):
            self._updates.stash_state(slot, checkpoint)
        return checkpoints

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
        copies = _Copies()
        placed: dict[int, int] = {}
        for slot, tables, chain in zip(slots, swapped, names, strict=True):
            for index, group in enumerate(self._tables.groups):
                first, num_full = tables.first[index], _num_full(tables, group)
                step = group.tokens_per_block // self._block_size
                row = [
                    self._fetch(
                        copies, index, host, placed, chain[(i + 1) * step - 1 : (i + 1) * step]
                    )
                    if i < num_full
                    else self._copy_in(copies, host)
                    for i, host in enumerate(tables.blocks[index], first)
                ]
                self._tables.start(slot, index, first, row)
        if not copies.device:
            return False
        self._host.hold(copies.host)
        self._pool.share(copies.device)
        self._transfers.start(ticket, copies.device, lambda _: self._host.let_go(copies.host))
        for host, block in zip(copies.host, copies.device, strict=True):
            self._updates.load(ticket, HOST_TIER, host, block)
        return True

    def discard(self, swapped: SavedTables) -> None:
        """Drop this sequence's K/V on the host, and its state: the next plan may still load that
        one."""
        self._updates.forget_stores(HOST_TIER, set(self._host.release(swapped)))
        if self._states is not None and swapped.checkpoint is not None:
            self._states.unstash(swapped.checkpoint)

    def _fetch(
        self,
        copies: _Copies,
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
            block = self._copy_in(copies, host)
        else:
            self._pool.share([block])
        placed[host] = block
        return block

    def _copy_in(self, copies: _Copies, host: int) -> int:
        block = self._pool.allocate()
        copies.host.append(host)
        copies.device.append(block)
        return block


def _num_full(swapped: SavedTables, group: KVGroup) -> int:
    """Return the blocks of a group that nothing writes any more. A partly filled block is not
    shared after a swap, because each of its owners is about to write into it."""
    return swapped.num_tokens // group.tokens_per_block
