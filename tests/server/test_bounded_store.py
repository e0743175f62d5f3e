"""Bounded tables of all callers: eviction, and its price."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.server.generation.receipts import ReceiptStore
from quire.server.readings.timeline import Timeline
from quire.server.requests.bounded_store import BoundedStore, BoundedTable
from quire.server.requests.limits import Limits
from quire.server.responses.store import ResponseStore, StoredResponse
from quire.server.sessions.store import Session, SessionStore
from tests.protocol.test_receipts import receipt_of

MAX_ROWS, MAX_BYTES = 4, 20
TABLE = BoundedTable(
    "things",
    "CREATE TABLE IF NOT EXISTS things (id TEXT NOT NULL, tenant TEXT NOT NULL, "
    "used_s INTEGER NOT NULL, num_bytes INTEGER NOT NULL, PRIMARY KEY (tenant, id));",
    order="used_s",
    last="id = 'z'",
    evicted="tenant, id",
)


class Things(BoundedStore):
    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path, lambda: 0.0, TABLE, max_rows=MAX_ROWS, max_bytes=MAX_BYTES)

    def put(self, thing: Thing, now: int) -> list[tuple[str, str]]:
        """Keep a thing, which stays, and return what made room."""
        row = (thing.name, thing.tenant, now, thing.size)
        self._database.execute("INSERT OR REPLACE INTO things VALUES (?, ?, ?, ?)", row)
        return self._make_room((thing.name, thing.tenant))

    def resize(self, thing: Thing) -> None:
        self._database.execute(
            "UPDATE things SET num_bytes = ? WHERE tenant = ? AND id = ?",
            (thing.size, thing.tenant, thing.name),
        )

    def drop(self, thing: Thing) -> None:
        self._database.execute(
            "DELETE FROM things WHERE tenant = ? AND id = ?", (thing.tenant, thing.name)
        )


class Thing(NamedTuple):
    tenant: str
    name: str
    size: int


class Plain:
    """The same rules over a dict, whose entries are in the order of their use."""

    def __init__(self) -> None:
        self.sizes: dict[tuple[str, str], int] = {}

    def put(self, thing: Thing) -> list[tuple[str, str]]:
        key = thing.tenant, thing.name
        self.sizes.pop(key, None)
        self.sizes[key] = thing.size
        gone: list[tuple[str, str]] = []
        while True:
            rows, size = Counter[str](), Counter[str]()
            for (tenant, _), each in self.sizes.items():
                rows[tenant] += 1
                size[tenant] += each
            if rows.total() > MAX_ROWS:
                most = rows
            elif size.total() > MAX_BYTES:
                most = size
            else:
                return gone
            # The first by name if two have as much.
            callers = sorted(most, key=lambda tenant: (-most[tenant], tenant))
            keys = [each for each in self.sizes if each != key]
            if not keys:
                return gone
            first = min(keys, key=lambda each: (each[1] == "z", callers.index(each[0])))
            gone.append(first)
            del self.sizes[first]


THINGS = st.builds(Thing, st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 12))


@given(st.lists(st.tuples(st.sampled_from(["put", "put", "resize", "drop"]), THINGS), max_size=30))
def test_the_caller_with_the_most_makes_room(
    calls: list[tuple[str, Thing]],
) -> None:
    plain = Plain()
    with contextlib.closing(Things()) as store:
        for now, (call, thing) in enumerate(calls):
            if call == "put":
                assert store.put(thing, now) == plain.put(thing)
            elif call == "resize":
                store.resize(thing)
                if (key := (thing.tenant, thing.name)) in plain.sizes:
                    plain.sizes[key] = thing.size
            else:
                store.drop(thing)
                plain.sizes.pop((thing.tenant, thing.name), None)
            assert (store.num_kept, store.num_bytes) == (
                len(plain.sizes),
                sum(plain.sizes.values()),
            )


def test_fronts_count_the_rows_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "shared.sqlite"
    with contextlib.closing(Things(path)) as one, contextlib.closing(Things(path)) as other:
        for number, store in enumerate([one, other, one, other]):
            assert store.put(Thing("a", str(number), 1), number) == []
        assert one.put(Thing("b", "x", 3), 9) == [("a", "0")]
        assert (other.num_kept, other.num_bytes) == (4, 6)


# --- price ----------------------------------------------------------------------------------------


def puts_receipts(num_kept: int) -> Iterator[BoundedStore]:
    store = ReceiptStore(Limits(max_receipts=num_kept), None, clock=itertools.count().__next__)
    yield store
    for number in itertools.count():
        store.put(receipt_of(), Timeline(f"r{number}", "/", "a"))
        yield store


def puts_responses(num_kept: int) -> Iterator[BoundedStore]:
    limits = Limits(max_stored_responses=num_kept)
    store = ResponseStore(limits, None, clock=itertools.count().__next__)
    yield store
    for number in itertools.count():
        body = {"status": "completed", "output": []}
        store.put(StoredResponse(f"resp_{number}", None, body, []), "a")
        yield store


def puts_sessions(num_kept: int) -> Iterator[BoundedStore]:
    store = SessionStore(Limits(max_sessions=num_kept), None, clock=itertools.count(1.0).__next__)
    yield store
    for number in itertools.count():
        store.put(Session(f"s{number}"), "a")
        yield store


def work_of_a_put(puts: Iterator[BoundedStore], num_kept: int) -> int:
    """Return how many steps SQLite's machine takes to keep one more row when the store is full."""
    store = next(puts)
    with contextlib.closing(store):
        for _ in range(num_kept + 1):
            next(puts)
        assert store.num_kept == num_kept
        steps = itertools.count()
        store._database.set_progress_handler(lambda: operator.index(next(steps)) < 0, 1)
        next(puts)
        return next(steps)


@pytest.mark.parametrize("puts", [puts_receipts, puts_responses, puts_sessions])
def test_a_full_store_costs_no_more_than_a_small_one(
    puts: Callable[[int], Iterator[BoundedStore]],
) -> None:
    """Fault: each call counted all rows and sorted them, 2 ms for 4,096 receipts."""
    few, many = (work_of_a_put(puts(num_kept), num_kept) for num_kept in (8, 512))
    assert 0 < many <= few + 20
