"""Offers of evicted blocks to sources, and notices to subscribers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.plan.kv_cache import ELSEWHERE, BlockHasher, BlockSource, KVManager
from quire.plan.kv_cache.notices import Notice, NoticeKind
from tests.kv_cache.fake_source import FakeSource
from tests.kv_cache.model import make_layout

NUM_BLOCKS = 8


def manager(*sources: BlockSource, num_host_blocks: int = 0) -> KVManager:
    """A device of eight blocks of one token."""
    return KVManager(
        make_layout(((None, 1),), 1),
        NUM_BLOCKS,
        2,
        NUM_BLOCKS,
        num_host_blocks,
        keeps_evicted=num_host_blocks > 0,
        sources=sources,
    )


def names(*tokens: int) -> list[bytes]:
    hasher, chain = BlockHasher(1, b"key"), list[bytes]()
    hasher.extend(chain, np.array(tokens, np.int32), hasher.root())
    return chain


def compute(kv: KVManager, chain: Sequence[bytes], *, settles: bool = True) -> None:
    """A sequence with these blocks comes and goes, in a plan of its own."""
    slots = np.zeros(1, np.int64)
    kv.mark()
    kv.enter(0, kv.prefixes.lookup([], 0))
    assert kv.grow(slots, slots, slots + len(chain))
    kv.publish(0, chain, len(chain))
    kv.free(0)
    if settles:
        kv.settle(kv.mark())


def stored(kv: KVManager) -> list[tuple[int, int]]:
    """Tier and ticket of each copy out of the next plan, whose tickets end well."""
    updates = kv.drain()
    for ticket in set(updates.store_ticket):
        kv.end_ticket(ticket)
    return list(zip(updates.store_tier, updates.store_ticket, strict=True))


def test_evicted_blocks_go_to_the_first_source_that_takes_them() -> None:
    near, far = FakeSource(1, 3), FakeSource(2, 100)
    kv = manager(near, far)
    compute(kv, names(*range(8)))
    compute(kv, names(*range(10, 15)))
    assert [tier for tier, _ in stored(kv)].count(1) == 3
    assert len(near.held) == 3
    assert len(far.held) == 2
    held = {name for _, name in (*near.held, *far.held)}
    assert held == set(names(*range(8))[3:])  # the last blocks of a prefix go first
    kv.check_invariants()


def test_a_block_that_is_held_is_not_copied_again() -> None:
    kv, old = manager(num_host_blocks=20), names(*range(8))
    compute(kv, old)
    compute(kv, names(*range(10, 18)))
    assert len(stored(kv)) == 8
    compute(kv, old)
    stored(kv)
    compute(kv, names(*range(20, 28)))
    assert len(stored(kv)) == 0


def test_a_block_that_may_be_retracted_is_not_kept() -> None:
    """Its row may fail, and it is garbage then."""
    kv = manager(num_host_blocks=20)
    compute(kv, names(*range(8)), settles=False)
    compute(kv, names(*range(10, 18)), settles=False)
    assert stored(kv) == []
    kv.settle(kv.mark())
    compute(kv, names(*range(20, 28)))
    assert len(stored(kv)) == 8


def test_a_store_can_be_loaded_when_its_ticket_has_ended() -> None:
    kv, old = manager(num_host_blocks=20), names(*range(8))
    compute(kv, old)
    compute(kv, names(*range(10, 18)))
    assert kv.sources.find_run(0, old) == []
    updates = kv.drain()
    lost = [updates.store_dst[updates.store_src.index(b)] for b in updates.store_src[:2]]
    (ticket,) = set(updates.store_ticket)
    kv.end_ticket(ticket, lost)
    assert kv.sources.totals.unstored == 2
    assert kv.sources.totals.stored == 6
    assert kv.host.num_named == 6
    kv.check_invariants()


def test_a_run_goes_on_from_holder_to_holder() -> None:
    kv, old = manager(num_host_blocks=20), names(*range(8))
    compute(kv, old)
    compute(kv, names(*range(10, 13)))
    stored(kv)
    assert kv.sources.find_run(0, old) == [*kv.pool.find_run(0, old[:5]), *[ELSEWHERE] * 3]
    assert (
        kv.sources.find_run(0, names(*range(7), 9))
        == kv.pool.find_run(0, old[:5]) + [ELSEWHERE] * 2
    )
    assert kv.sources.find(0, old[7]) == ELSEWHERE
    assert kv.sources.find(0, names(0, 9)[1]) is None


def test_a_load_is_published_when_it_has_arrived() -> None:
    kv, old = manager(num_host_blocks=20), names(*range(8))
    compute(kv, old)
    compute(kv, names(*range(10, 18)))
    stored(kv)
    ticket = next(kv.ticket_numbers)
    kv.sources.load([(0, name) for name in old[:5]], [], ticket)
    assert kv.pool.find_run(0, old) == []
    assert kv.transfers.num_orphaned == 5
    updates = kv.drain()
    assert updates.load_ticket == [ticket] * 5
    kv.end_ticket(ticket, [updates.load_dst[3]])
    assert len(kv.pool.find_run(0, old)) == 3
    assert kv.sources.totals.loaded == 4
    assert kv.sources.find(0, old[3]) is None, "a block that was lost is held still"
    assert kv.pool.num_used == 0
    kv.check_invariants()


def test_subscribers_are_told_what_came_and_went() -> None:
    told: list[Notice] = []
    kv, old = manager(num_host_blocks=20), names(*range(8))
    kv.sources.subscribe(told.append)
    compute(kv, old)
    assert told == [Notice(NoticeKind.STORED, "device", (0, name)) for name in old]
    told.clear()
    compute(kv, names(10, 11))
    stored(kv)
    gone = [(0, old[7]), (0, old[6])]
    assert [n for n in told if n.kind is NoticeKind.REMOVED] == [
        Notice(NoticeKind.REMOVED, "device", block) for block in gone
    ]
    assert [n.block for n in told if n.medium == "host"] == gone
    told.clear()
    kv.drop_cached()
    assert told == [Notice(NoticeKind.CLEARED, medium) for medium in ("device", "host")]


def test_without_sources_nothing_is_offered() -> None:
    kv = manager()
    assert not kv.sources
    compute(kv, names(*range(8)))
    compute(kv, names(*range(10, 18)))
    assert stored(kv) == []


def test_what_swapped_sequences_need_is_not_given_to_evicted_blocks() -> None:
    kv = manager(num_host_blocks=4)
    slots = np.zeros(1, np.int64)
    kv.enter(0, kv.prefixes.lookup([], 0))
    assert kv.grow(slots, slots, slots + 4)
    (saved,) = kv.swaps.swap_out(slots, slots + 4) or []
    kv.free(0)
    stored(kv)
    compute(kv, names(*range(8)))
    compute(kv, names(*range(10, 18)))
    assert stored(kv) == []
    kv.swaps.discard(saved)
    kv.check_invariants()


def test_blocks_before_those_of_a_load_stay_until_it_ends() -> None:
    kv, old = manager(num_host_blocks=20), names(*range(8))
    compute(kv, old)
    compute(kv, names(*range(10, 13)))
    stored(kv)
    kept, ticket = kv.pool.find_run(0, old), next(kv.ticket_numbers)
    assert len(kept) == 5
    kv.sources.load([(0, name) for name in old[5:]], kept, ticket)
    assert kv.pool.num_available == 0
    kv.end_ticket(ticket)
    assert len(kv.pool.find_run(0, old)) == 8
    assert kv.pool.num_available == 8


def test_stores_that_are_lost_leave_nothing_behind() -> None:
    """Neither a copy in the next plan, nor a name, nor a place that is held."""
    source = FakeSource(1, 20)
    for kv in (manager(num_host_blocks=20), manager(source)):
        for is_planned in (False, True):
            compute(kv, names(*range(8)))
            compute(kv, names(*range(10, 18)))
            if is_planned:
                kv.drain()
            kv.lose_copies()
            kv.drop_cached()
            assert stored(kv) == []
            assert kv.host.num_named == len(source.held) == 0
            assert kv.host._pool.num_used == 0
    assert len(source._free) == 20


def test_stores_from_before_a_reset_bring_no_names() -> None:
    source = FakeSource(1, 20)
    for kv in (manager(num_host_blocks=20), manager(source)):
        compute(kv, names(*range(8)))
        compute(kv, names(*range(10, 18)))
        kv.drop_cached()
        assert len(stored(kv)) == 8
        assert kv.host.num_named == len(source.held) == 0
        compute(kv, names(*range(8)))
        compute(kv, names(*range(10, 18)))
        assert len(stored(kv)) == 8
        assert kv.host.num_named + len(source.held) == 8


def test_the_host_drops_what_was_used_longest_ago() -> None:
    """A block that the device evicts again counts as used."""
    kv = manager(num_host_blocks=16)
    again, once, new, newer = (names(*range(start, start + 8)) for start in (0, 10, 20, 30))
    for chain in (again, once, again, new, newer):
        compute(kv, chain)
        stored(kv)
    assert kv.host.num_held(0, again) == kv.host.num_held(0, new) == 8
    assert kv.host.num_held(0, once) == 0
