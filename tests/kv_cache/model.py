"""A data side for `KVManager` alone: memory that remembers what was last written where."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from quire.config.kv_layout import KVFormat, KVGroup, KVLayout, LayerKV
from quire.plan.kv_cache import BlockHasher, KVManager, PrefixHit, SavedTables, TableUpdates

MAX_SEQS = 5
MAX_LEN = 24
MAX_STEP = 7

Content = tuple[int, ...]
"""K/V of a token: a function of the layer group and of all tokens up to it. A recurrent state: the
tokens that it has seen."""

GroupKinds = tuple[tuple[int | None, int], ...]
"""Per layer group, its window and how many names a block of it stands for."""


def make_layout(kinds: GroupKinds, block_size: int, *, has_states: bool = False) -> KVLayout:
    """One layer per group. Tokens are the larger, the fewer a block has."""
    most = math.lcm(*(names for _, names in kinds))
    groups = tuple(
        KVGroup(
            (i,),
            LayerKV.with_window(window, KVFormat(1, most // names, most // names, 4)),
            names * block_size,
        )
        for i, (window, names) in enumerate(kinds)
    )
    return KVLayout(groups, block_size, state_bytes=8 * has_states)


@dataclass
class Row:
    """A live sequence. `plan` side: names; data side: its own tables, from updates alone."""

    tokens: list[int]
    num_computed: int
    tables: list[dict[int, int]]
    names: list[bytes] = field(default_factory=list)
    unwritten: tuple[int, int] = (0, 0)
    states: list[Content] = field(default_factory=lambda: [(), ()])  # read this one, write that


class PagedModel:
    def __init__(
        self,
        kinds: GroupKinds,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int = 0,
        num_checkpoints: int | None = None,
    ) -> None:
        """num_checkpoints: checkpoints of recurrent states; None: the model has no states."""
        self.layout = make_layout(kinds, block_size, has_states=num_checkpoints is not None)
        self.groups, self.block_size = self.layout.groups, block_size
        self.kv = KVManager(
            self.layout, num_blocks, MAX_SEQS, MAX_LEN, num_host_blocks, num_checkpoints or 0
        )
        self.checkpoints: list[Content | None] = [None] * (num_checkpoints or 0)
        self.hasher = BlockHasher(block_size, b"key")
        self.root = self.hasher.root()
        self.rows: dict[int, Row] = {}
        self.memory: list[dict[int, Content]] = [{} for _ in range(num_blocks)]
        self.host_memory: list[dict[int, Content]] = [{} for _ in range(num_host_blocks)]
        self.swapped: list[list[tuple[Row, SavedTables]]] = []
        self.num_tickets = 0
        self.entered: list[int] = []
        self.saving: dict[int, bytes] = {}  # slots whose state is kept after this step
        self.leaving: dict[int, Content] = {}  # states of rows that leave, by checkpoint
        self.returning: dict[int, int] = {}  # checkpoints of slots that come back with it

    @property
    def free_slots(self) -> list[int]:
        return [slot for slot in range(MAX_SEQS) if slot not in self.rows]

    # --- the plan of a step --------------------------------------------------------------------

    def grow(self, counts: dict[int, int]) -> bool:
        """Plan `counts` more tokens, by slot."""
        slots = np.array(list(counts), np.int64)
        starts = np.array([self.rows[slot].num_computed for slot in counts], np.int64)
        ends = starts + np.array(list(counts.values()), np.int64)
        before = self.snapshot()
        if not self.kv.grow(slots, starts, ends):
            assert self.kv.pool.num_used < self.kv.pool.num_blocks or counts
            self._check_only_released(before)
            return False
        for slot, end in zip(counts, ends.tolist(), strict=True):
            row = self.rows[slot]
            row.unwritten = (row.num_computed, end)
            row.num_computed = end
            bound = self.layout.most_blocks(end, MAX_STEP)
            assert self.kv.num_held_blocks(slot) <= bound, "most_blocks is no upper bound"
        return True

    def snapshot(self) -> tuple[int, dict[int, list[list[int]]]]:
        tables = {slot: [t.tolist() for t in self.kv.tables(slot)] for slot in self.rows}
        return len(self.kv._updates.pending.block), tables

    def _check_only_released(self, before: tuple[int, dict[int, list[list[int]]]]) -> None:
        num_updates, tables = before
        assert len(self.kv._updates.pending.block) == num_updates, "a refused growth left updates"
        for slot, row in self.rows.items():
            for group, (old, new) in enumerate(
                zip(tables[slot], self.kv.tables(slot), strict=True)
            ):
                first = self.groups[group].first_block_needed(row.num_computed)
                for index, (was, is_now) in enumerate(zip(old, new.tolist(), strict=True)):
                    past = index < first
                    assert was == is_now or past, "a refused growth changed a table"

    def publish(self, slot: int) -> None:
        row = self.rows[slot]
        self.hasher.extend(row.names, np.array(row.tokens, np.int32), self.root)
        num_full = min(row.num_computed, len(row.tokens)) // self.block_size
        self.kv.publish(slot, row.names, num_full)
        if row.num_computed == num_full * self.block_size and row.unwritten[1]:
            self.saving[slot] = row.names[num_full - 1]

    def enter(self, slot: int, tokens: list[int]) -> PrefixHit:
        names: list[bytes] = []
        self.hasher.extend(names, np.array(tokens, np.int32), self.root)
        hit = self.kv.prefixes.lookup(names, len(tokens) - 1)
        available = self.kv.pool.num_available
        needed = self.kv.prefixes.num_blocks_to_enter(hit, hit.num_tokens)
        self.kv.enter(slot, hit)
        assert self.kv.pool.num_available == available - needed
        tables = [
            {i: int(block) for i, block in enumerate(table)} for table in self.kv.tables(slot)
        ]
        row = Row(tokens, hit.num_tokens, tables, names)
        if hit.checkpoint is not None:  # as the plan that enters it loads it
            state = self.checkpoints[hit.checkpoint]
            assert state is not None, "a checkpoint is found before it is saved"
            row.states[0] = state
        self.rows[slot] = row
        self.entered.append(slot)
        return hit

    # --- its execution -------------------------------------------------------------------------

    def execute(self, garbage: int | None = None) -> None:
        """Copy, update tables, write and read, in the order of the contract. garbage: a slot that
        writes nonsense."""
        for slot, name in self.saving.items():
            if slot in self.rows:
                self.kv.save_state(slot, name)
        self.saving.clear()
        updates = self._apply_updates()
        for _ in range(2):  # a step may be computed again before it is committed
            for slot, row in self.rows.items():
                for group in range(len(self.groups)):
                    self._write(row, group, is_garbage=slot == garbage)
                self._advance(row, is_garbage=slot == garbage)
        for row in self.rows.values():
            if row.unwritten[1]:
                row.states.reverse()
        for slot, checkpoint in zip(updates.save_slot, updates.save_checkpoint, strict=True):
            self.checkpoints[checkpoint] = self.rows[slot].states[0]
        for slot, row in self.rows.items():
            if slot != garbage and garbage is None:
                self._read(slot, row)
            row.unwritten = (0, 0)
        self.entered.clear()

    def _apply_updates(self) -> TableUpdates:
        updates = self.kv.drain()
        for checkpoint in updates.stash_checkpoint:
            self.checkpoints[checkpoint] = self.leaving[checkpoint]
        self.leaving.clear()
        for slot, checkpoint in self.returning.items():
            state = self.checkpoints[checkpoint]
            assert state is not None, "a state comes back that was never kept"
            self.rows[slot].states[0] = state
        self.returning.clear()
        assert len(set(updates.copy_dst)) == len(updates.copy_dst)
        assert not set(updates.copy_dst) & set(updates.copy_src)
        for src, dst in zip(updates.store_src, updates.store_dst, strict=True):
            self.host_memory[dst] = dict(self.memory[src])
        copied = [dict(self.memory[block]) for block in updates.copy_src]
        for block, content in zip(updates.copy_dst, copied, strict=True):
            self.memory[block] = content
        for src, dst in zip(updates.load_src, updates.load_dst, strict=True):
            self.memory[dst] = dict(self.host_memory[src])
        for group, slot, index, block in zip(
            updates.group, updates.slot, updates.index, updates.block, strict=True
        ):
            self.rows[slot].tables[group][index] = block
        return updates

    def _write(self, row: Row, group: int, is_garbage: bool) -> None:
        for position in range(*row.unwritten):
            index, offset = divmod(position, self.groups[group].tokens_per_block)
            content = (-1,) if is_garbage else (group, *row.tokens[: position + 1])
            self.memory[row.tables[group][index]][offset] = content

    def _advance(self, row: Row, is_garbage: bool) -> None:
        """Give the state of a row its next tokens: read one, write the other."""
        start, end = row.unwritten
        if self.kv.states is not None and end:
            row.states[1] = (-1,) if is_garbage else (*row.states[0], *row.tokens[start:end])

    def _read(self, slot: int, row: Row) -> None:
        """Everything that the queries of this step, or else the next one's, may see."""
        first_query = row.unwritten[0] if row.unwritten[1] else row.num_computed
        if self.kv.states is not None:
            seen = list(row.states[0])
            assert seen == row.tokens[: row.num_computed], f"slot {slot} has the state of {seen}"
        for index, group in enumerate(self.groups):
            start = 0 if group.window is None else max(first_query - group.window + 1, 0)
            for position in range(start, row.num_computed):
                place, offset = divmod(position, group.tokens_per_block)
                content = self.memory[row.tables[index][place]].get(offset)
                assert content == (index, *row.tokens[: position + 1]), (
                    f"slot {slot} group {index} position {position} reads {content}"
                )

    def fork(self, src: int, dst: int) -> None:
        row = self.rows[src]
        self.kv.fork(src, dst)
        self.rows[dst] = Row(
            list(row.tokens), row.num_computed, [dict(t) for t in row.tables], list(row.names)
        )
        self.rows[dst].states = list(row.states)

    def swap_out(self, slots: list[int]) -> bool:
        """Return whether the host took all rows, and checkpoints their states."""
        computed = np.array([self.rows[slot].num_computed for slot in slots], np.int64)
        stored = self.kv.swaps.swap_out(np.array(slots, np.int64), computed)
        if stored is None:
            return False
        self.swapped.append([(self.rows[s], each) for s, each in zip(slots, stored, strict=True)])
        for slot, each in zip(slots, stored, strict=True):
            row = self.rows[slot]
            if each.checkpoint is not None:
                self.leaving[each.checkpoint], row.states = row.states[0], [(-1,), (-1,)]
            self.free(slot)
        return True

    def swap_in(self, group: list[tuple[Row, SavedTables]]) -> bool:
        """Each sequence of the group comes back and computes what is left of it; whether it did."""
        rows, swapped = [row for row, _ in group], [each for _, each in group]
        ends = [min(len(row.tokens), row.num_computed + MAX_STEP) for row in rows]
        needed = self.kv.swaps.num_blocks_to_swap_in(swapped, ends)
        if len(rows) > len(self.free_slots) or needed > self.kv.pool.num_available:
            return False
        slots, available = self.free_slots[: len(rows)], self.kv.pool.num_available
        self.num_tickets += 1
        self.kv.swaps.swap_in(slots, swapped, [row.names for row in rows], self.num_tickets)
        self.swapped.remove(group)
        for slot, row in zip(slots, rows, strict=True):
            tables = self.kv.tables(slot)
            row.tables = [{i: int(b) for i, b in enumerate(table)} for table in tables]
            self.rows[slot] = row
        for slot, each in zip(slots, swapped, strict=True):
            if each.checkpoint is not None:
                self.returning[slot] = each.checkpoint
        counts = {
            slot: end - row.num_computed
            for slot, row, end in zip(slots, rows, ends, strict=True)
            if end > row.num_computed
        }
        assert not counts or self.grow(counts), "fewer blocks were counted than it takes"
        assert available - self.kv.pool.num_available <= needed
        self.execute()
        self.kv.end_ticket(self.num_tickets)
        for each in swapped:
            self.kv.swaps.discard(each)
        return True

    def free(self, slot: int) -> None:
        self.kv.free(slot)
        del self.rows[slot]
