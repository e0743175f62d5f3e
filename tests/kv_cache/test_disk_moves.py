"""Blocks on their way to a disk and back, in any order and with any losses: a name always leads to
the numbers computed under it."""

from __future__ import annotations

import random
from collections import deque

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from quire.config.kv_disk.records import RECORD
from quire.plan.kv_cache import ELSEWHERE, BlockHasher, KVManager
from quire.plan.kv_cache.disk_index import DiskIndex
from quire.plan.kv_cache.notices import BlockName
from quire.plan.kv_cache.sources import SAVE_SECONDS
from quire.protocol.block_moves import BlockMove, MoveKind, MoveOutcome
from tests.kv_cache.model import make_layout
from tests.profiles import examples

NUM_BLOCKS, NUM_SLOTS, MAX_LENGTH = 16, 12, 9


class Machine:
    """A device whose blocks hold names, and a disk that may lose what it likes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = DiskIndex(NUM_SLOTS, np.zeros(0, RECORD))
        layout = make_layout(((None, 1),), 1)
        self.kv = KVManager(layout, NUM_BLOCKS, 1, NUM_BLOCKS, disk=self.disk)
        self.held: dict[int, bytes] = {}  # by device block
        self.slots: dict[int, bytes] = {}
        self.queues: dict[MoveKind, deque[BlockMove]] = {
            MoveKind.SAVE: deque(), MoveKind.LOAD: deque(),
        }  # fmt: skip
        self.num_loaded = self.num_cancelled = 0
        self.now = 0.0

    def chain(self, branch: int, length: int) -> list[bytes]:
        tokens = [0, 1, 2, *range(10 * branch + 10, 10 * branch + 20)][:length]
        names, hasher = list[bytes](), BlockHasher(1, b"key")
        hasher.extend(names, np.array(tokens, np.int32), hasher.root())
        return names

    def compute(self, names: list[bytes], *, fails: bool) -> None:
        """A sequence comes, takes what is cached, computes the rest, and goes."""
        kv, slots = self.kv, np.zeros(1, np.int64)
        hit = kv.prefixes.lookup(names, len(names) - 1)
        mark = kv.mark()
        if kv.prefixes.num_blocks_to_enter(hit, len(names)) > kv.pool.num_available:
            return
        kv.enter(0, hit)
        starts = slots + hit.num_tokens
        assert kv.grow(slots, starts, slots + len(names))
        for index, block in enumerate(kv.tables(0)[0][: len(names)].tolist()):
            if index >= hit.num_tokens:
                self.held[block] = b"wrong" if fails else names[index]
            else:
                assert self.held[block] == names[index], "a hit has other contents"
        kv.publish(0, names, len(names))
        if fails:
            kv.retract(mark)
        kv.free(0)
        kv.settle(kv.mark())
        kv.drain()

    def load(self, names: list[bytes]) -> None:
        found = self.kv.sources.find_run(0, names)
        wanted: list[BlockName] = [
            (0, name)
            for name, block in zip(names, found, strict=False)
            if block == ELSEWHERE and self.kv.sources.ticket_of((0, name)) is None
        ]
        kept = [block for block in found if block != ELSEWHERE]
        free = self.kv.pool.num_available - self.kv.pool.num_unused(kept)
        near, far = self.kv.sources.parts(wanted)
        assert not near
        if far and len(far) <= free:
            self.kv.sources.load(far, kept, next(self.kv.ticket_numbers))

    def give(self) -> None:
        for move in self.kv.sources.take_moves():
            kind = MoveKind.LOAD if move.kind is MoveKind.LOAD else MoveKind.SAVE
            self.queues[kind].append(move)
        for ticket in self.kv.sources.take_cancelled():
            self.cancel(ticket)

    def cancel(self, ticket: int) -> None:
        """End a move at once: its device blocks may have other contents from now on. A write that
        was under way reaches its slot all the same."""
        for queue in self.queues.values():
            for move in [each for each in queue if each.ticket == ticket]:
                queue.remove(move)
                self.slots.update(dict.fromkeys(move.places.tolist() * (queue is self.saves)))
                lost = move.all_lost
                self.num_cancelled += 1
                self.kv.sources.moved(ticket, lost)
                self.kv.end_ticket(ticket, lost.lost.tolist())

    @property
    def saves(self) -> deque[BlockMove]:
        return self.queues[MoveKind.SAVE]

    def grow_late(self, kind: MoveKind) -> None:
        """Nobody waits any more for what is under way."""
        if kind is MoveKind.LOAD:
            self.kv.sources.late(list(self.kv.sources._loads))
        else:
            self.now += 2 * SAVE_SECONDS
            self.kv.sources.expire(self.now)
            self.kv.sources.expire(self.now + 2 * SAVE_SECONDS)
        self.give()

    def end_one(self, kind: MoveKind, losses: float) -> None:
        self.give()
        if not self.queues[kind]:
            return
        move = self.queues[kind].popleft()
        lost = self.carry_out(move, losses)
        self.kv.sources.moved(move.ticket, MoveOutcome(np.array(lost, np.int32), 0.1))
        self.kv.end_ticket(move.ticket, lost)

    def carry_out(self, move: BlockMove, losses: float) -> list[int]:
        lost: list[int] = []
        if move.kind is MoveKind.CLEAR:
            self.slots.clear()
        if move.kind is MoveKind.NOTE:
            return lost
        rows = zip(move.blocks.tolist(), move.places.tolist(), move.names, strict=True)
        for block, slot, saved in rows:
            is_save = move.kind is MoveKind.SAVE
            if self.rng.random() < losses:
                self.slots[slot] = b"torn"
                lost.append(slot if is_save else block)
            elif is_save:
                assert self.held[block] == saved.name, "a block was given away while it was saved"
                self.slots[slot] = saved.name
            elif self.slots.get(slot) != saved.name:
                lost.append(block)
                self.held[block] = b"wrong"
            else:
                self.held[block] = saved.name
                self.num_loaded += 1
        return lost

    def check(self) -> None:
        self.kv.check_invariants()
        for branch in range(4):
            for name in self.chain(branch, MAX_LENGTH):
                block = self.kv.pool.find(0, name)
                assert block is None or self.held[block] == name


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "compute",
                "fail",
                "load",
                "save",
                "read",
                "lose",
                "drop",
                "wipe",
                "late load",
                "late save",
            ]
        ),
        st.integers(0, 3),
        st.integers(1, MAX_LENGTH),
    ),
    max_size=60,
)


@examples(200)
@given(STEPS, st.integers(0, 2**32))
def test_a_name_leads_to_its_contents(steps: list[tuple[str, int, int]], seed: int) -> None:
    machine = Machine(seed)
    for what, branch, length in steps:
        names = machine.chain(branch, length)
        if what in ("compute", "fail"):
            machine.compute(names, fails=what == "fail")
        elif what == "load":
            machine.load(names)
        elif what == "drop":
            machine.kv.drop_cached()
        elif what in ("late load", "late save"):
            machine.grow_late(MoveKind.LOAD if what == "late load" else MoveKind.SAVE)
        elif what == "wipe":
            machine.kv.drop_cached()
            machine.kv.sources.wipe()
        else:
            kind = MoveKind.LOAD if what == "read" else MoveKind.SAVE
            machine.end_one(kind, 0.3 if what == "lose" else 0.0)
        machine.check()
    for kind in (*MoveKind.__members__.values(), MoveKind.SAVE):
        while machine.queues.get(kind):
            machine.end_one(kind, 0.0)
    machine.give()


def test_the_machine_loads_and_drops() -> None:
    """Else the property above could hold of a disk that does nothing."""
    machine = Machine(0)
    for branch in (0, 1, 2, 0):
        machine.compute(machine.chain(branch, MAX_LENGTH), fails=False)
        for _ in range(20):
            machine.end_one(MoveKind.SAVE, 0.0)
    machine.kv.drop_cached()
    machine.load(machine.chain(0, MAX_LENGTH))
    machine.end_one(MoveKind.LOAD, 0.0)
    assert machine.num_loaded > 3
    assert machine.kv.sources.totals.removed > 0
    machine.check()


def test_the_machine_cancels() -> None:
    """A disk that hangs keeps no block; when it answers, what it has is used again."""
    machine = Machine(0)
    machine.compute(machine.chain(0, MAX_LENGTH), fails=False)
    for _ in range(20):
        machine.end_one(MoveKind.SAVE, 0.0)
    machine.kv.drop_cached()
    machine.load(machine.chain(0, MAX_LENGTH))
    machine.give()
    machine.grow_late(MoveKind.LOAD)
    machine.check()
    assert machine.num_cancelled == 1
    assert machine.kv.pool.num_used == 0
    machine.load(machine.chain(0, MAX_LENGTH))
    assert not machine.kv.sources.has_moves, "another load began on a disk that hangs"
    machine.end_one(MoveKind.LOAD, 0.0)
    machine.load(machine.chain(0, MAX_LENGTH))
    machine.end_one(MoveKind.LOAD, 0.0)
    assert machine.num_loaded == MAX_LENGTH
    machine.compute(machine.chain(1, MAX_LENGTH), fails=False)
    machine.give()
    machine.grow_late(MoveKind.SAVE)
    assert (machine.num_cancelled, machine.kv.pool.num_used) == (2, 0)
    machine.check()


def test_what_waits_for_a_disk_that_hangs_is_bounded() -> None:
    """No more waits than the device has blocks."""
    machine = Machine(0)
    for branch in range(20):
        machine.compute(machine.chain(branch, MAX_LENGTH), fails=False)
        machine.check()
    assert len(machine.kv.sources._unsaved) <= NUM_BLOCKS
