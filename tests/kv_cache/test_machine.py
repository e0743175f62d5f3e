"""Any sequence of operations on `KVManager`, against memory that remembers what was written.

Faults it would catch: a missed or late copy on write, a block given to two owners, a released block
that is still read, a prefix hit on the wrong content, a leaked or doubly freed block, a refused
growth that changes something, blocks that survive the failure of the row that wrote them.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.kv_cache.model import MAX_LEN, MAX_SEQS, MAX_STEP, PagedModel, make_layout
from tests.profiles import machine_settings

KINDS = st.sampled_from(
    [
        ((None, 1),),
        ((3, 1),),
        ((None, 1), (4, 1)),
        ((5, 1), (None, 1), (2, 1)),
        ((1, 1), (6, 1)),
        ((None, 1), (None, 3)),
        ((None, 3), (4, 1)),
        ((6, 3), (None, 1), (2, 2)),
    ]
)
"""Window, and names per block, of each group. 16 and 48 tokens per page are 1 and 3 names."""


class KVMachine(RuleBasedStateMachine):
    @initialize(
        kinds=KINDS,
        block_size=st.sampled_from([1, 2, 3, 4]),
        tokens=st.integers(6, 80),
        host_blocks=st.sampled_from([0, 3, 12, 100]),
        checkpoints=st.sampled_from([None, None, 0, 1, 4]),
    )
    def build(self, kinds, block_size, tokens, host_blocks, checkpoints):
        num_blocks = make_layout(kinds, block_size).blocks_for(tokens)
        self.model = PagedModel(kinds, block_size, num_blocks, host_blocks, checkpoints)

    def _draw_counts(self, data) -> dict[int, int]:
        """Tokens that some slots compute in this step."""
        counts: dict[int, int] = {}
        for slot, row in self.model.rows.items():
            limit = min(len(row.tokens) - row.num_computed, MAX_STEP)
            if limit and data.draw(st.booleans()):
                counts[slot] = data.draw(st.integers(1, limit))
        return counts

    @rule(data=st.data(), length=st.integers(2, MAX_LEN), text=st.integers(0, 1))
    def enter(self, data, length, text):
        """A sequence comes in with what the cache has, and computes in the same step."""
        model = self.model
        if not model.free_slots:
            return
        slot = model.free_slots[0]
        tokens = [text + i // 9 for i in range(length)]
        if data.draw(st.booleans()):
            tokens[-1] = 9
        hit = model.enter(slot, tokens)
        limit = min(length - hit.num_tokens, MAX_STEP)
        if model.grow({slot: data.draw(st.integers(1, limit))}):
            model.publish(slot)
            model.execute()
        else:
            model.kv.forget_updates({slot})
            model.free(slot)

    @rule(data=st.data(), publish=st.booleans())
    def step(self, data, publish):
        """Some go on; while it is planned, another may enter and read what they will write."""
        model = self.model
        counts = self._draw_counts(data)
        if not counts or not model.grow(counts):
            return
        if publish:
            for slot in counts:
                model.publish(slot)
        if model.free_slots and data.draw(st.booleans()):
            source = data.draw(st.sampled_from(sorted(model.rows)))
            model.enter(model.free_slots[0], [*model.rows[source].tokens[: MAX_LEN - 1], 8])
        model.execute()

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def extend(self, data):
        """Sampled tokens."""
        for row in self.model.rows.values():
            if len(row.tokens) < MAX_LEN and row.num_computed == len(row.tokens):
                row.tokens.append(data.draw(st.integers(0, 2)))

    @precondition(lambda self: self.model.rows and self.model.free_slots)
    @rule(data=st.data())
    def fork(self, data):
        src = data.draw(st.sampled_from(sorted(self.model.rows)))
        self.model.fork(src, self.model.free_slots[0])

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def beam_step(self, data):
        """Some of the rows go on twice, and some not at all. The step copies at most one block of
        each group per row that is left, and the blocks of the others come back at once."""
        model = self.model
        ready = [
            slot
            for slot, row in sorted(model.rows.items())
            if row.num_computed == len(row.tokens) < MAX_LEN
        ]
        if not ready:
            return
        going_on = data.draw(st.lists(st.sampled_from(ready), min_size=1, max_size=len(ready)))
        for slot in set(ready) - set(going_on):
            model.free(slot)
        live: list[int] = []
        for slot in going_on:
            if slot in live:
                copy = model.free_slots[0]
                model.fork(slot, copy)
                live.append(copy)
            else:
                live.append(slot)
        for number, slot in enumerate(live):
            model.rows[slot].tokens.append(number % 3)
        copies = model.kv._updates.pending.copy_dst
        before = len(copies)
        if model.grow(dict.fromkeys(live, 1)):
            assert len(copies) - before <= len(live) * len(model.groups)
            model.execute()

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def free(self, data):
        self.model.free(data.draw(st.sampled_from(sorted(self.model.rows))))

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def fail(self, data):
        """A row writes garbage into blocks that are published already, and another one enters on
        them; the failed row goes, and whoever shares or was planned with it."""
        model = self.model
        counts = self._draw_counts(data)
        mark = model.kv.mark()
        if not counts or not model.grow(counts):
            return
        for slot in counts:
            model.publish(slot)
        bad = data.draw(st.sampled_from(sorted(counts)))
        if model.free_slots:
            model.enter(model.free_slots[0], [*model.rows[bad].tokens[: MAX_LEN - 1], 8])
        starts = model.rows[bad].unwritten[0]
        bad_block = starts // model.block_size
        prefix = model.rows[bad].tokens[: (bad_block + 1) * model.block_size]
        entered = list(model.entered)
        model.execute(garbage=bad)
        model.kv.retract(mark)
        shared = {block for block, content in enumerate(model.memory) if (-1,) in content.values()}
        for slot, row in list(model.rows.items()):
            holds = any(block in shared for table in row.tables for block in table.values())
            if slot == bad or slot in entered or holds or row.tokens[: len(prefix)] == prefix:
                model.free(slot)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), takes_effect=st.booleans())
    def swap_out(self, data, takes_effect):
        """Some sequences go together; the copies may share a plan with what comes next."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model.rows)), min_size=1))
        if self.model.swap_out(sorted(set(slots))) and takes_effect:
            self.model.execute()

    @precondition(lambda self: self.model.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        group = data.draw(st.sampled_from(self.model.swapped))
        self.model.swap_in(group)

    @precondition(lambda self: self.model.swapped)
    @rule(data=st.data())
    def discard(self, data):
        """One sequence of a swapped group is aborted."""
        group = data.draw(st.sampled_from(self.model.swapped))
        row_and_tables = data.draw(st.sampled_from(group))
        self.model.kv.swaps.discard(row_and_tables[1])
        group.remove(row_and_tables)
        if not group:
            self.model.swapped.remove(group)

    @rule()
    def settle(self):
        self.model.kv.settle(self.model.kv.mark())

    @invariant()
    def books_balance(self):
        if hasattr(self, "model"):
            self.model.kv.check_invariants()

    def teardown(self):
        if not hasattr(self, "model"):
            return
        for slot in list(self.model.rows):
            self.model.free(slot)
        for group in self.model.swapped:
            for _, tables in group:
                self.model.kv.swaps.discard(tables)
        self.model.kv.drain()
        self.model.kv.check_invariants()
        assert self.model.kv.host.num_used == 0, "a host block was lost"
        assert self.model.kv.pool.num_used == 0, "a block was lost"
        assert len(self.model.free_slots) == MAX_SEQS


def test_every_read_finds_what_was_written():
    run_state_machine_as_test(KVMachine, settings=machine_settings(examples=120, steps=40))
