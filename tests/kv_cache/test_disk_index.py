"""The books of a disk: the limit holds, leaves go first, and what a cut left is found again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from quire.base.errors import ConfigError
from quire.config.kv_disk.records import (
    HEADER_BYTES,
    RECORD,
    StoreHeader,
    read_header,
    read_records,
    seal,
)
from quire.plan.kv_cache.disk_index import DiskIndex
from quire.plan.kv_cache.notices import Notice, NoticeKind
from quire.protocol.block_moves import MoveKind, MoveOutcome, SavedBlock
from tests.profiles import examples

NO_RECORDS = np.zeros(0, RECORD)
Chain = tuple[int, int]
"""A branch of prompts, and the length of one of them."""


def name_of(branch: int, depth: int) -> bytes:
    """Branches share their first two blocks."""
    return bytes([0 if depth < 2 else branch + 1, depth]).ljust(16, b"n")


def blocks_of(branch: int, length: int) -> list[SavedBlock]:
    names = [name_of(branch, depth) for depth in range(length)]
    parents = [b"", *names[:-1]]
    return [
        SavedBlock(0, *each, depth) for depth, each in enumerate(zip(names, parents, strict=True))
    ]


class Books:
    """An index, and records as the data side would write them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.records = np.zeros(num_slots, RECORD)
        self.index = DiskIndex(num_slots, NO_RECORDS)
        self.names: set[bytes] = set()
        self.index.subscribe(self.take)
        self.ticket = 0
        self.saving: dict[int, dict[int, tuple[int, SavedBlock]]] = {}

    def take(self, notice: Notice) -> None:
        if notice.block is None:
            self.names.clear()
        elif notice.kind is NoticeKind.STORED:
            self.names.add(notice.block[1])
        else:
            self.names.remove(notice.block[1])

    def start(self, blocks: list[SavedBlock]) -> int:
        self.ticket += 1
        self.saving[self.ticket] = self.index.save(blocks, self.ticket)
        return self.ticket

    def end(self, ticket: int, lost: frozenset[int] = frozenset()) -> None:
        for slot, block in self.saving.pop(ticket).values():
            if slot not in lost:
                self.records[slot] = record_of(block)
        self.index.end(ticket, lost)

    def save(self, blocks: list[SavedBlock]) -> None:
        self.end(self.start(blocks))

    def held(self, branch: int, length: int) -> int:
        return self.index.num_held(0, [name_of(branch, depth) for depth in range(length)])


def record_of(block: SavedBlock) -> np.void:
    record = np.zeros(1, RECORD)
    record["name"], record["depth"] = np.void(block.name), block.depth
    record["parent"] = np.void(block.parent.ljust(16, b"\0"))
    record["value"], record["hits"] = block.value, block.hits
    record["seal"] = seal(record)
    return record[0]


def test_the_leaf_worth_least_goes_first() -> None:
    books = Books(6)
    books.save(blocks_of(0, 4))
    books.save(blocks_of(1, 4)[2:])
    books.index.touch([(0, name_of(0, depth)) for depth in range(4)])
    books.save(blocks_of(2, 3))
    assert books.held(0, 4) == 4, "a prefix that was used has gone"
    assert books.held(1, 4) == 3, "a parent has gone before its child"
    books.index.check_invariants()


def names_of(branch: int, length: int) -> list[bytes]:
    return [name_of(branch, depth) for depth in range(length)]


def test_guarded_blocks_go_when_there_is_nothing_else() -> None:
    books = Books(6)
    books.index.guard(names_of(0, 4))  # before they come
    books.save(blocks_of(0, 4))
    books.save(blocks_of(1, 4)[2:])
    for _ in range(3):
        books.index.touch([(0, name) for name in names_of(1, 4)])
    books.save(blocks_of(2, 4)[2:])
    assert (books.held(0, 4), books.held(2, 4)) == (4, 4)
    books.save(blocks_of(3, 6)[2:])
    assert books.held(0, 4) >= 2 and books.held(3, 6) == 6, "a full disk takes no more"
    books.index.check_invariants()


def test_a_guard_counts() -> None:
    """Two pins with a common beginning."""
    books = Books(4)
    books.save(blocks_of(0, 4))
    books.index.guard(names_of(0, 4))
    books.index.guard(names_of(0, 3))
    books.index.unguard(names_of(0, 4))
    books.save(blocks_of(1, 3)[2:])
    assert (books.held(0, 4), books.held(1, 3)) == (3, 3)
    books.save(blocks_of(2, 3)[2:])
    assert (books.held(0, 4), books.held(1, 3), books.held(2, 3)) == (3, 2, 3)
    books.index.unguard(names_of(0, 3))
    books.index.touch([(0, name_of(2, 2))])
    books.save(blocks_of(3, 3)[2:])
    assert (books.held(0, 4), books.held(2, 3), books.held(3, 3)) == (2, 3, 3)
    books.index.check_invariants()


def test_what_is_read_is_not_given_away() -> None:
    books = Books(2)
    books.save(blocks_of(0, 2))
    slots = books.index.load([(0, name_of(0, 0)), (0, name_of(0, 1))], 100)
    assert not books.index.save(blocks_of(1, 3)[2:], 101)
    books.index.forget((0, name_of(0, 0)))
    assert books.held(0, 2) == 0
    assert not set(slots) & {slot for slot, _ in books.index.save(blocks_of(0, 1), 102).values()}
    books.index.end(100, ())
    assert len(books.index.save(blocks_of(0, 2), 103)) == 2
    books.index.check_invariants()


def test_a_child_is_not_taken_without_its_parent() -> None:
    books = Books(4)
    books.save(blocks_of(0, 3)[1:])
    assert books.index.num_named == 0


def test_a_full_disk_is_tried_again_later() -> None:
    books = Books(8)
    books.save(blocks_of(0, 3))
    ticket = books.start(blocks_of(1, 5)[2:])
    slots = [slot for slot, _ in books.saving[ticket].values()]
    books.end(ticket, frozenset(slots))
    books.save(blocks_of(2, 3)[2:])
    assert books.index.num_named == 3, "the file grew on a full disk"
    assert books.held(2, 3) == 3
    for turn in range(1500):
        books.save(blocks_of(3 + turn % 200, 3)[2:])
    assert books.index.num_named > 3


def test_wiped_and_retired_books_offer_nothing() -> None:
    books = Books(4)
    ticket = books.start(blocks_of(0, 2))
    books.index.wipe()
    books.end(ticket)
    assert (books.index.num_named, books.names) == (0, set())
    books.save(blocks_of(0, 2))
    assert books.held(0, 2) == 2
    books.index.retire()
    assert books.held(0, 2) == 0
    assert not books.index.save(blocks_of(1, 3)[2:], 99)


def test_a_late_load_stops_all_others() -> None:
    books = Books(4)
    books.save(blocks_of(0, 2))
    books.index.stall(MoveKind.LOAD, 50)
    assert books.held(0, 2) == 0
    assert not books.index.save(blocks_of(0, 3), 60)
    books.index.end(50, ())
    assert books.held(0, 2) == 2


def test_a_late_save_stops_saves_alone() -> None:
    books = Books(4)
    books.save(blocks_of(0, 2))
    books.index.stall(MoveKind.SAVE, 50)
    assert books.held(0, 2) == 2
    assert not books.index.save(blocks_of(0, 3), 60)
    books.index.end(50, ())
    assert books.index.save(blocks_of(0, 3), 60)


def test_the_cost_of_a_load_is_learnt() -> None:
    """Few blocks say nothing, one slow load says little, and a decision is tried again."""
    index = DiskIndex(4, NO_RECORDS)
    index.end_move(MoveKind.LOAD, MoveOutcome(seconds=3.0), 3)
    assert index.seconds_to_load(100) == 0.0
    index.end_move(MoveKind.LOAD, MoveOutcome(seconds=1.0), 10)
    assert index.seconds_to_load(10) == pytest.approx(1.0)
    index.end_move(MoveKind.LOAD, MoveOutcome(seconds=2.0), 10)
    assert index.seconds_to_load(10) == pytest.approx(1.2)
    index.end_move(MoveKind.LOAD, MoveOutcome(seconds=0.5), 10)
    assert index.seconds_to_load(10) == pytest.approx(0.5)
    index.end_move(MoveKind.LOAD, MoveOutcome(np.arange(10, dtype=np.int32)), 10)
    assert index.seconds_to_load(10) == pytest.approx(0.5), "a load that failed was fast"
    for _ in range(40):
        index.declined()
    assert index.seconds_to_load(10) < 0.25


MOVES = st.one_of(
    st.tuples(st.just("save"), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.just("lose"), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.just("start"), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.just("end"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("touch"), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.just("read"), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.just("forget"), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.just("guard"), st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.just("wipe"), st.just(0), st.just(0)),
)


@examples(200)
@given(st.integers(1, 9), st.lists(MOVES, max_size=40), st.data())
def test_any_history_and_any_cut(
    num_slots: int, moves: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """Slots are never lost or given twice, every block has its parent, notices are true, and an
    index that is opened on a part of the file holds whole chains of what was written."""
    books, open_tickets = Books(num_slots), list[int]()
    reading: list[int] = []
    guarded: list[list[bytes]] = []
    for number, (what, branch, length) in enumerate(moves):
        if what in ("save", "lose", "start"):
            ticket = books.start(blocks_of(branch, length))
            open_tickets.append(ticket)
            if what != "start":
                slots = [slot for slot, _ in books.saving[ticket].values()]
                books.end(open_tickets.pop(), frozenset(slots[:1] if what == "lose" else ()))
        elif what == "end" and open_tickets:
            books.end(open_tickets.pop(branch % len(open_tickets)))
        elif what == "touch":
            books.index.touch([(0, name_of(branch, depth)) for depth in range(length)])
        elif what == "read":
            count = books.held(branch, length)
            books.index.load([(0, name_of(branch, d)) for d in range(count)], 1000 + number)
            reading.append(1000 + number)
        elif what == "forget":
            books.index.forget((0, name_of(branch, length)))
        elif what == "guard":
            guarded.append(names_of(branch, length))
            books.index.guard(guarded[-1])
        elif what == "wipe":
            books.index.wipe()
            books.records[:] = np.zeros((), RECORD)
        if len(reading) > 2:
            books.index.end(reading.pop(0), ())
        if len(guarded) > 2:
            books.index.unguard(guarded.pop(0))
        books.index.check_invariants()
        assert books.names == {name for _, name in books.index._tree.names()}
        assert books.index.num_named <= num_slots
    data_bytes = books.records.tobytes()
    cut = data.draw(st.integers(0, len(data_bytes)))
    check_reopened(data_bytes[:cut], num_slots)


def check_reopened(data: bytes, num_slots: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        path.write_bytes(bytes(HEADER_BYTES) + data)
        records = read_records(path, num_slots)
    index = DiskIndex(num_slots, records)
    index.check_invariants()
    known = {each["name"].tobytes() for each in records}
    names = [name for _, name in index._tree.names()]
    for name in names:
        assert name in known
        assert name[1] == 0 or any(other[1] == name[1] - 1 for other in names)


def test_a_changed_byte_of_a_record_is_seen() -> None:
    data = bytearray(record_of(blocks_of(0, 2)[1]).tobytes())
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x40
        record = np.frombuffer(changed, RECORD)
        assert seal(record)[0] != record["seal"][0], place


def test_a_header_is_read_or_refused(tmp_path: Path) -> None:
    header = StoreHeader("ab" * 32, "model", 100, 4096, 10**6)
    path = tmp_path / "header"
    path.write_bytes(header.encode())
    assert read_header(path) == header
    for cut in (0, 1, 20, 60):
        path.write_bytes(header.encode()[:cut])
        with pytest.raises(ConfigError, match="is no header"):
            read_header(path)
    path.write_bytes(header.encode().replace(b'"format": 2', b'"format": 9'))
    with pytest.raises(ConfigError, match="format 9"):
        read_header(path)
