"""Gives blocks to sequences and takes them back: growth, copy-on-write, forks, pins, names."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.config.kv_layout import KVLayout
from quire.plan.kv_cache.block_tables import BlockTables
from quire.plan.kv_cache.disk_index import DiskIndex
from quire.plan.kv_cache.disk_states import DiskStates
from quire.plan.kv_cache.events import EventLog
from quire.plan.kv_cache.host_tier import HostTier
from quire.plan.kv_cache.pool import BlockPool
from quire.plan.kv_cache.prefix_lookup import PrefixHit, PrefixLookup
from quire.plan.kv_cache.saved_tables import SavedTables
from quire.plan.kv_cache.sources import BlockSource, Sources
from quire.plan.kv_cache.state_pool import StatePool
from quire.plan.kv_cache.swaps import Swaps
from quire.plan.kv_cache.table_updates import TableUpdates, UpdateLog
from quire.plan.kv_cache.transfers import Transfers
from quire.protocol.block_moves import SavedBlock
from quire.protocol.step import IntArray

__all__ = ["KVManager"]

Slots = npt.NDArray[np.int64]

_STATE = -1
"""In place of a block, in the log of publications: the checkpoint of a recurrent state."""


class _Publication(NamedTuple):
    """A name that may still be retracted. mark: in the order of publications. first_name: index of
    the block's first name. block: the named one, or `_STATE`. saved: the part that a disk keeps."""

    mark: int
    slot: int
    first_name: int
    block: int
    name: bytes
    saved: SavedBlock | None = None


class KVManager:
    """Blocks of the sequences that have a slot. Every count here is a plan-side upper bound.

    layout: the layer groups. prefixes: finds cached blocks. swaps: copies to the host and back.
    sources: others that hold blocks by name. all_prefixes: finds blocks of the device or of a
    source. transfers: copies to the device. ticket_numbers: numbers that were never used before.
    states: checkpoints of recurrent states; None if the model has none. num_resets: number of times
    that all names were forgotten.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        num_checkpoints: int = 0,
        *,
        keeps_evicted: bool = False,
        sources: Sequence[BlockSource] = (),
        disk: DiskIndex | None = None,
        tells_events: bool = False,
        num_state_parts: int = 0,
    ) -> None:
        """keeps_evicted: whether host blocks that no swapped sequence needs hold evicted blocks
        under their names. sources: others that hold blocks, nearest first. disk: the farthest,
        written as blocks are computed. tells_events: whether `events` are logged. num_state_parts:
        number of blocks that a recurrent state takes there."""
        self.layout = layout
        self.block_size = layout.block_size
        self.pool = BlockPool(num_blocks, len(layout.groups))
        self.host = HostTier(num_host_blocks, len(layout.groups))
        self.states = StatePool(num_checkpoints) if layout.state_bytes else None
        self._groups = layout.groups
        self._tables = BlockTables(layout.groups, max_num_seqs, max_model_len)
        self._updates = UpdateLog()
        self.prefixes = PrefixLookup(self.pool, self.pool, self.states, layout)
        self.ticket_numbers = count()
        self.transfers = Transfers(self.pool)
        tables = (self._tables, self.block_size, self.pool)
        self.swaps = Swaps(*tables, self.host, self._updates, self.transfers, self.states)
        self.sources = Sources(
            self.pool,
            (*([self.host] if keeps_evicted and num_host_blocks else []), *sources),
            self.transfers,
            self._updates,
            self.ticket_numbers,
            self._unsettled,
            disk,
            has_bytes=layout.page_bytes > 0,
        )
        self.disk = disk
        self.disk_states: DiskStates | None = None
        if disk is not None and self.states is not None:
            self.disk_states = DiskStates(
                self.states, disk, self.sources, len(layout.groups), num_state_parts
            )
        all_states = self.disk_states or self.states
        self.all_prefixes = PrefixLookup(self.sources, self.pool, all_states, layout)
        self._names_per_block = [g.tokens_per_block // layout.block_size for g in layout.groups]
        self._num_published = np.zeros(max_num_seqs, np.int64)
        self._shares_tail = np.zeros(max_num_seqs, np.bool_)
        self._held: set[SavedTables] = set()
        # States of slots: the name of the last one that was kept in passing; and those that wait
        # for names, oldest first, each with the number of its blocks and its checkpoint.
        self._passing: dict[int, bytes] = {}
        self._unnamed: dict[int, deque[tuple[int, int]]] = {}
        self._mark = 0
        self._log: deque[_Publication] = deque()
        self.num_resets = 0
        self.events = self._open_events() if tells_events else None

    def _open_events(self) -> EventLog:
        may_leave = bool(self.host.num_blocks)
        num_leaving = self.pool.num_blocks if may_leave else 0
        log = EventLog(
            self.layout,
            lambda: {each.name for each in self._log},
            num_leaving,
            parent_of=(lambda _: None) if self.disk is None else self.disk.parent_of,
        )
        if self.disk is not None:
            log.start_with("disk", self.disk.blocks())
        self.sources.subscribe(log.note)
        return log

    # --- growing -------------------------------------------------------------------------------

    def grow(self, slots: Slots, starts: Slots, ends: Slots) -> bool:
        """Give each slot the blocks to hold tokens up to `ends`, of which the step writes those
        from `starts` on. Shapes [R]. False, and nothing is given, when they do not all fit; blocks
        that a window has left behind are released either way."""
        self._slide(slots, starts)
        growth = self._growth(slots, ends)
        sharing = self._shares_tail[slots].nonzero()[0]
        if not growth and not len(sharing):
            return True
        needed = sum(int(counts.sum()) for _, _, counts in growth)
        if needed + self._num_copies(slots, starts, sharing) > self.pool.num_available:
            return False
        for i in sharing.tolist():
            self._copy_on_write(int(slots[i]), int(starts[i]))
        for group, growing, counts in growth:
            self._append_blocks(group, growing, counts)
        return True

    def _growth(self, slots: Slots, ends: Slots) -> list[tuple[int, Slots, Slots]]:
        """(group, slots, blocks that each of them lacks) of the groups in which some do."""
        growth: list[tuple[int, Slots, Slots]] = []
        for index, group in enumerate(self._groups):
            lacking = -(-ends // group.tokens_per_block) - self._tables.num_blocks[index][slots]
            growing = (lacking > 0).nonzero()[0]
            if len(growing):
                growth.append((index, slots[growing], lacking[growing]))
        return growth

    def _append_blocks(self, group: int, slots: Slots, counts: Slots) -> None:
        """`counts` more blocks of a group for each of `slots`."""
        total = int(counts.sum())
        owner, index = slots, self._tables.num_blocks[group][slots]
        if total > len(slots):  # not one for each, as in decoding
            place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
            owner, index = np.repeat(owner, counts), np.repeat(index, counts) + place
        blocks = self.pool.allocate_many(total)
        self._tables.by_group[group][owner, index] = blocks
        self._updates.entries(group, owner.tolist(), index.tolist(), blocks)
        self._tables.num_blocks[group][slots] += counts

    def _num_copies(self, slots: Slots, starts: Slots, sharing: Slots) -> int:
        """Count the copies of shared tail blocks. The last owner of a block writes in place; other
        owners that write in this step need a copy."""
        writers: dict[int, int] = {}
        for i in sharing.tolist():
            for _, _, block in self._shared_tails(int(slots[i]), int(starts[i])):
                writers[block] = writers.get(block, 0) + 1
        return sum(min(count, self._num_owners(block) - 1) for block, count in writers.items())

    def _slide(self, slots: Slots, starts: Slots) -> None:
        """Release blocks that lie wholly before the window of the step's first query."""
        for index, group, window in self._tables.sliding:
            first = self._tables.first[index]
            needed = np.maximum(starts - window + 1, 0) // group.tokens_per_block
            for i in (needed > first[slots]).nonzero()[0].tolist():
                blocks = self._tables.advance_first(int(slots[i]), index, int(needed[i]))
                self._release_backwards(blocks)

    def _shared_tails(self, slot: int, start: int) -> list[tuple[int, int, int]]:
        """(group, index, block) of tail blocks that a write at `start` would share with others."""
        tails: list[tuple[int, int, int]] = []
        for group, table in enumerate(self._tables.by_group):
            index = start // self._groups[group].tokens_per_block
            if index < self._tables.num_blocks[group][slot]:
                tails.append((group, index, int(table[slot, index])))
        return [entry for entry in tails if self._num_owners(entry[2]) > 1]

    def _num_owners(self, block: int) -> int:
        """Tables that name the block; references held for copies are not owners."""
        return self.pool.ref_count(block) - self._updates.pending.copy_src.count(block)

    def _copy_on_write(self, slot: int, start: int) -> None:
        for group, index, shared in self._shared_tails(slot, start):
            block = self.pool.allocate()
            self._updates.copy(shared, block)  # the source keeps its reference until the drain, so
            self._tables.by_group[group][slot, index] = block  # that it is no destination as well
            self._updates.entries(group, [slot], [index], [block])
        self._shares_tail[slot] = False

    def give_back(self, slots: Slots, ends: Slots) -> None:
        """Take back the blocks of `slots` [R] that lie wholly beyond their first `ends` [R] tokens,
        which held tokens that were not accepted."""
        for index, group in enumerate(self._groups):
            kept = -(-ends // group.tokens_per_block)
            for i in (self._tables.num_blocks[index][slots] > kept).nonzero()[0].tolist():
                blocks = self._tables.cut(int(slots[i]), index, int(kept[i]))
                self._release_backwards(blocks)

    # --- what changed --------------------------------------------------------------------------

    def drain(self) -> TableUpdates:
        """Return the changes since the last call; copy sources lose the reference held for the
        copy."""
        updates = self._updates.drain()
        if self.states is not None:
            self.states.plan_made()
        for block in updates.copy_src:
            self.pool.release(block)
        return updates

    def forget_updates(self, slots: Collection[int]) -> None:
        """Drop what was recorded of slots that enter with whole tables, or not at all."""
        self._updates.forget_entries(slots)

    def forget_copies(self) -> None:
        """Drop copies into blocks that have no owner any more."""
        for block in self._updates.forget_copies(lambda dst: self.pool.ref_count(dst) > 0):
            self.pool.release(block)

    # --- coming, branching, going --------------------------------------------------------------

    def enter(self, slot: int, hit: PrefixHit) -> None:
        """Start the tables of an empty slot with the blocks of a prefix hit."""
        for group, blocks in enumerate(hit.blocks):
            held = [block for block in blocks if block is not None]
            first = len(blocks) - len(held)
            if None in blocks[first:]:
                raise EngineError(f"the prefix hit {blocks} has a hole: take it from lookup")
            self.pool.share(held)
            self._tables.start(slot, group, first, held)
        if self.states is not None and hit.checkpoint is not None:
            self.states.touch(hit.checkpoint)
        self._num_published[slot] = hit.num_tokens // self.block_size
        self._shares_tail[slot] = any(hit.num_tokens % g.tokens_per_block for g in self._groups)

    def fork(self, src: int, dst: int) -> None:
        """`dst`, an empty slot, shares all blocks of `src`, the partly filled one too."""
        for group in range(len(self._groups)):
            held = self._tables.held(src, group)
            self.pool.share(held)
            self._tables.start(dst, group, int(self._tables.first[group][src]), held)
        self._num_published[dst] = self._num_published[src]
        self._shares_tail[src] = True
        self._shares_tail[dst] = True

    def free(self, slot: int) -> None:
        """Release a slot's blocks, last ones first, so that prefixes are evicted last."""
        for blocks in self._tables.clear(slot):
            self._release_backwards(blocks)
        self._num_published[slot] = 0
        self._shares_tail[slot] = False
        if self.states is not None:
            self._keep_last_state(slot)
            for _, checkpoint in self._unnamed.pop(slot, ()):
                self.states.release(checkpoint)

    def _keep_last_state(self, slot: int) -> None:
        """Save the newest state that a slot has kept in passing, when it ends."""
        name = self._passing.pop(slot, None)
        if name is None or self.disk_states is None:
            return
        if all(each.name != name or each.block != _STATE for each in self._log):
            self.disk_states.settled(name)  # else `settle` does so

    def _release_backwards(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.pool.release(block)

    def num_intact(self, slot: int, num_tokens: int, lost: Collection[int]) -> int:
        """Return how many of a slot's first tokens are still valid if the blocks `lost` hold
        nothing; 0 if a window would reach blocks before the ones that it has. Fewer than
        `num_tokens` end where every group has a whole page, so that computing them again writes
        into no shared block."""
        kept = num_tokens
        for index, group in enumerate(self.layout.groups):
            for i, block in enumerate(
                self._tables.held(slot, index), int(self._tables.first[index][slot])
            ):
                if block in lost:
                    kept = min(kept, i * group.tokens_per_block)
                    break
        if kept < num_tokens:
            kept -= kept % self.layout.hit_tokens
        firsts = zip(self.layout.groups, self._tables.first, strict=True)
        if any(first[slot] > group.first_block_needed(kept) for group, first in firsts):
            return 0
        return kept

    def tables(self, slot: int) -> tuple[IntArray, ...]:
        """Copies of a slot's block tables, one per group; released entries are 0."""
        return self._tables.copies(slot)

    # --- held sequences ------------------------------------------------------------------------

    def state_within(self, names: Sequence[bytes], num_tokens: int) -> int | None:
        """Return the checkpoint at the last place within so many tokens where a prefix can end, by
        the names of their blocks; None if there is none."""
        count = num_tokens // self.layout.hit_tokens * self.layout.hit_tokens // self.block_size
        if self.states is None or not 0 < count <= len(names):
            return None
        return self.states.find(names[count - 1])

    def names_to_guard(self, names: Sequence[bytes], num_tokens: int) -> list[bytes]:
        """Return names of what a disk has of a prefix of so many tokens: blocks, and parts of the
        state at the last place where the prefix can end."""
        whole = list(names[: num_tokens // self.block_size])
        step = self.layout.hit_tokens // self.block_size
        if self.disk_states is not None and (last := whole[: len(whole) // step * step]):
            whole += self.disk_states.names_of(last[-1])
        return whole

    def hold(self, slot: int, num_tokens: int, checkpoint: int | None = None) -> SavedTables:
        """Keep the blocks of a slot's first tokens after the slot has been freed, and a checkpoint
        (`state_within`)."""
        tables = self._tables.held_of_prefix(slot, num_tokens, num_tokens - 1)
        first = tuple(first for first, _ in tables)
        blocks = tuple(tuple(blocks) for _, blocks in tables)
        held = SavedTables(num_tokens, first, blocks, checkpoint)
        self.pool.share(held.all_blocks())
        if self.states is not None and checkpoint is not None:
            self.states.hold(checkpoint)
        self._shares_tail[slot] = True
        self._held.add(held)
        return held

    def release_held(self, held: SavedTables) -> None:
        self._held.remove(held)
        self._release_backwards(held.all_blocks())
        if self.states is not None and held.checkpoint is not None:
            self.states.let_go(held.checkpoint)

    # --- publishing ----------------------------------------------------------------------------

    def num_published(self, slots: Slots) -> Slots:
        """Names already published or taken from the cache, by slot; one stands for `block_size`
        tokens."""
        return self._num_published[slots]

    def publish(self, slot: int, names: Sequence[bytes], num_names: int) -> None:
        """Publish this slot's blocks under their names, up to the block that ends with
        `names[num_names - 1]`."""
        published = int(self._num_published[slot])
        for group, table in enumerate(self._tables.by_group):
            step = self._names_per_block[group]
            start = max(published // step, int(self._tables.first[group][slot]))
            blocks = table[slot, start : num_names // step].tolist()
            for index, block in enumerate(blocks, start):
                self._publish_block(slot, group, index, block, names)
        self._num_published[slot] = num_names

    def publish_next(self, slots: Slots, chains: Sequence[Sequence[bytes]]) -> None:
        """Publish one name more of each of `slots` [N], by the names of each: for the steady step,
        in which a few of many sequences complete a block."""
        count = self._num_published[slots] + 1
        owners = slots.tolist()
        for group, table in enumerate(self._tables.by_group):
            step = self._names_per_block[group]
            index = count // step - 1
            is_full = index >= self._tables.first[group][slots]
            if step > 1:
                is_full &= count % step == 0
            blocks, place = table[slots, index].tolist(), index.tolist()
            rows = zip(owners, place, blocks, chains, is_full.tolist(), strict=True)
            for slot, at, block, names, full in rows:
                if full:
                    self._publish_block(slot, group, at, block, names)
        self._num_published[slots] = count

    def _publish_block(
        self, slot: int, group: int, index: int, block: int, names: Sequence[bytes]
    ) -> None:
        """names: all names of the slot, up to this block at least."""
        first_name = index * self._names_per_block[group]
        name = names[first_name + self._names_per_block[group] - 1]
        if self.pool.publish(block, group, name):
            saved = None
            if self.sources.takes_settled:
                follows = index > 0 and self._groups[group].window is None
                parent = names[first_name - 1] if follows else b""
                saved = SavedBlock(group, name, parent, index if follows else 0)
            self._log.append(_Publication(self._mark, slot, first_name, block, name, saved))

    def touch(self, names: Sequence[bytes], num_names: int) -> None:
        """Note a use of the blocks of the first `num_names` names, for the disk."""
        if self.disk is None:
            return
        for group, step in enumerate(self._names_per_block):
            self.sources.touch(group, names[step - 1 : num_names : step])
        if self.disk_states is not None and num_names:
            self.disk_states.touch(names[num_names - 1])
        self.sources.note_uses()

    def save_state(self, slot: int, name: bytes, *, in_passing: bool = False) -> None:
        """Keep the recurrent state that a slot has after the next step, which ends the block with
        this name, for sequences that enter after that step. in_passing: keep it only until the
        slot's next state is kept, unless a sequence has started from it."""
        checkpoint = None if self.states is None else self.states.save(name)
        if checkpoint is not None:
            self._updates.save_state(slot, checkpoint)
        self._state_kept(slot, name, is_new=checkpoint is not None, in_passing=in_passing)

    def save_unnamed_state(self, slot: int, num_names: int, num_drafts: int = 0) -> None:
        """Keep the recurrent state that a slot has in the next step after its block
        `num_names - 1`, if it accepts the first `num_drafts` of its drafts. Nobody finds it before
        `name_states`."""
        checkpoint = None if self.states is None else self.states.reserve()
        if checkpoint is not None:
            self._updates.save_state(slot, checkpoint, num_drafts)
            self._unnamed.setdefault(slot, deque()).append((num_names, checkpoint))

    def drop_unnamed_states(self, slot: int, num_names: int) -> None:
        """Forget the unnamed states behind a slot's first `num_names` whole blocks: its drafts
        before them were not accepted."""
        if self.states is None or slot not in self._unnamed:
            return
        waiting = self._unnamed[slot]
        while waiting and waiting[-1][0] > num_names:
            self.states.release(waiting.pop()[1])
        if not waiting:
            del self._unnamed[slot]

    @property
    def slots_with_unnamed_states(self) -> tuple[int, ...]:
        """Slots for which `name_states` is due when more of their tokens are known."""
        return tuple(self._unnamed)

    def name_states(self, slot: int, names: Sequence[bytes]) -> None:
        """Give the states of a slot the names of their last blocks, as far as `names` go. They are
        kept in passing: within an output only the newest one counts."""
        waiting = self._unnamed[slot]
        while waiting and waiting[0][0] <= len(names):
            num_names, checkpoint = waiting.popleft()
            name = names[num_names - 1]
            is_new = self.states is not None and self.states.give_name(checkpoint, name)
            self._state_kept(slot, name, is_new=is_new, in_passing=True)
        if not waiting:
            del self._unnamed[slot]

    def _state_kept(self, slot: int, name: bytes, *, is_new: bool, in_passing: bool) -> None:
        """Note that there is a checkpoint after the block with this name, which a slot has. is_new:
        True if the slot has just saved it."""
        if self.states is None:
            return
        before = self._passing.pop(slot, None)
        if before is not None and before != name:
            self.states.forget(before, unless_used=True)
        if is_new:
            first_name = int(self._num_published[slot])
            self._log.append(_Publication(self._mark, slot, first_name, _STATE, name))
            if in_passing:
                self._passing[slot] = name

    def was_evicted(self, names: Sequence[bytes], first_name: int) -> bool:
        """Return whether the block after the first `first_name` names was given to others lately.
        A window's blocks count as those of full attention."""
        for group, step in enumerate(self._names_per_block):
            last = (first_name // step + 1) * step - 1
            if last < len(names) and self.pool.was_evicted((group, names[last])):
                return True
        return False

    def drop_cached(self) -> None:
        """Forget all names of blocks and of states in memory; their owners keep the blocks."""
        self.num_resets += 1
        self.pool.drop_cached()
        self.sources.clear()
        if self.disk_states is not None:
            self.disk_states.clear()
        if self.states is not None:
            self.states.forget_all()
            self._passing.clear()

    def mark(self) -> int:
        """A new mark in the order of publications, for `retract` and `settle`."""
        self._mark += 1
        return self._mark

    def retract(self, mark: int) -> None:
        """Unpublish all blocks that were published since `mark`; the slots that still hold them
        may publish them again."""
        while self._log and self._log[-1].mark >= mark:
            last = self._log.pop()
            if last.block != _STATE:
                self.pool.retract(last.block, last.name)
            elif self.states is not None:
                self.states.forget(last.name)
            self._num_published[last.slot] = min(self._num_published[last.slot], last.first_name)

    def settle(self, mark: int) -> None:
        """Mark everything published before `mark` as certain: it will not be retracted."""
        settled: list[tuple[int, SavedBlock]] = []
        while self._log and self._log[0].mark < mark:
            first = self._log.popleft()
            if first.saved is not None:
                settled.append((first.block, first.saved))
            is_state = first.block == _STATE and self._passing.get(first.slot) != first.name
            if is_state and self.disk_states is not None:
                self.disk_states.settled(first.name)
        if settled:
            self.sources.settled(settled)

    def _unsettled(self) -> set[int]:
        """Return the blocks whose publications may still be retracted."""
        return {each.block for each in self._log}

    # --- copies under tickets ------------------------------------------------------------------

    def end_ticket(self, ticket: int, lost: Collection[int] = ()) -> None:
        """Take in that copies have ended; an unknown ticket is ignored. lost: destinations that
        they did not fill."""
        self.transfers.end(ticket, lost)
        self.sources.beside.end(ticket, lost)
        self.sources.end(ticket, lost)
        if self.disk_states is not None:
            self.disk_states.end(ticket, lost)
        self.sources.save_more()

    def lose_copies(self) -> list[int]:
        """No copy under a ticket that has not ended counts any more. Return the tickets of copies
        to the device."""
        self.sources.lose_stores()
        return self.transfers.lose_all()

    @property
    def num_orphaned(self) -> int:
        """Device blocks that only running copies and moves hold: they are free when these end."""
        return self.transfers.num_orphaned + self.sources.beside.num_orphaned

    @property
    def has_copies_to_start(self) -> bool:
        """True if there are copies to the device that no plan carries yet, or copies out that must
        be made before blocks are loaded beside the steps."""
        pending = self._updates.pending
        return bool(pending.load_dst or (pending.store_src and self.sources.has_moves))

    # --- truths --------------------------------------------------------------------------------

    @property
    def num_table_entries(self) -> int:
        """Blocks that all tables name together, pinned ones included; more than are in use where
        sequences share."""
        return self._tables.num_entries + sum(len(held.all_blocks()) for held in self._held)

    def num_held_blocks(self, slot: int) -> int:
        return self._tables.num_held(slot)

    def held_blocks(self, slot: int) -> list[list[int]]:
        """Return the blocks that a slot's tables hold, per layer group."""
        return [self._tables.held(slot, group) for group in range(self._tables.num_groups)]

    def holds_start(self, slot: int) -> bool:
        """Return whether the first layer group holds a slot's blocks from the first token on."""
        return not self._tables.first[0][slot]

    def check_invariants(self) -> None:
        """EngineError unless free + used + cached = total and references equal table entries."""
        references = Counter(self._updates.pending.copy_src)
        references.update(self._tables.entries())
        for held in self._held:
            references.update(held.all_blocks())
        references.update(self.transfers.held_blocks())
        references.update(self.sources.beside.held_blocks())
        self.pool.check_invariants(references)
        self.host.check_invariants()
        if self.disk is not None:
            self.disk.check_invariants()
        if self.states is not None:
            self.states.check_invariants()
