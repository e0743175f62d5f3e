"""Choice of the block that is handed out, found or evicted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import EngineError
from quire.plan.kv_cache import BlockHasher, BlockPool, KVManager
from tests.kv_cache.model import make_layout
from tests.profiles import machine_settings


@machine_settings(examples=150)
@given(st.lists(st.tuples(st.sampled_from(["publish", "share", "release", "allocate", "find"]),
                          st.integers(0, 11)), max_size=80))  # fmt: skip
def test_eviction_is_least_recently_used(moves):
    """Against a plain list of unreferenced named blocks; would catch first-in-first-out, and a hit
    that does not refresh a block."""
    pool = BlockPool(4, 1)
    owners: dict[int, int] = {}
    names: dict[int, bytes] = {}
    lru: list[int] = []
    for move, number in moves:
        block = number % 4
        if move == "allocate" and pool.num_available:
            expected = lru[0] if not pool.num_free else None
            block = pool.allocate()
            if expected is not None:
                assert block == expected, "not the least recently used one was evicted"
                lru.remove(block)
                del names[block]
            owners[block] = 1
        elif move == "publish" and owners.get(block):
            name = bytes([number])
            if pool.publish(block, 0, name):
                names[block] = name
        elif move == "share" and (owners.get(block) or block in lru):
            pool.share([block])
            owners[block] = owners.get(block, 0) + 1
            lru = [other for other in lru if other != block]
        elif move == "release" and owners.get(block):
            pool.release(block)
            owners[block] -= 1
            if not owners[block] and block in names:
                lru.append(block)
        elif move == "find":
            expected = next((b for b, name in names.items() if name == bytes([number])), None)
            assert pool.find(0, bytes([number])) == expected
        assert (pool.num_cached, pool.num_used) == (len(lru), sum(n > 0 for n in owners.values()))
        pool.check_invariants(owners)


def test_a_full_pool_says_so():
    pool = BlockPool(1, 1)
    pool.allocate()
    with pytest.raises(EngineError, match="only 0 of 1 are not in use"):
        pool.allocate()


def test_a_sequences_last_blocks_are_evicted_first():
    """A prefix is of use to more prompts than what follows it."""
    kv, names = _published(num_blocks=4)
    kv.free(0)
    kv.pool.allocate()
    assert kv.prefixes.lookup(names, 100).num_tokens // 4 == 3


def _published(num_blocks: int) -> tuple[KVManager, list[bytes]]:
    """A slot whose blocks were published one by one, under marks 1, 2, ..."""
    kv = KVManager(make_layout(((None, 1),), 4), num_blocks, 2, 4 * num_blocks)
    names = [bytes([i]) for i in range(num_blocks)]
    assert kv.grow(np.array([0]), np.array([0]), np.array([4 * num_blocks]))
    for i in range(num_blocks):
        assert kv.mark() == i + 1
        kv.publish(0, names, i + 1)
    kv.drain()
    return kv, names


def test_a_name_is_forgotten_only_while_it_may_be_wrong():
    kv, names = _published(num_blocks=4)
    kv.settle(3)
    kv.retract(0)
    assert kv.prefixes.lookup(names, 100).num_tokens // 4 == 2
    kv.check_invariants()


def test_names_forgotten_for_others_fault_are_published_again():
    """Without it an innocent long sequence would have a hole in its cached prefix for good."""
    kv, names = _published(num_blocks=4)
    kv.retract(2)
    assert kv.prefixes.lookup(names, 100).num_tokens // 4 == 1
    kv.publish(0, names, 4)
    assert kv.prefixes.lookup(names, 100).num_tokens // 4 == 4


def test_a_block_that_a_window_released_is_not_published():
    """Tokens may become known after the window has passed them; the table's entry is then 0, which
    is another sequence's block."""
    kv = KVManager(make_layout(((2, 1),), 1), 8, 2, 8)
    assert kv.grow(np.array([1]), np.array([0]), np.array([1]))
    for start in range(5):
        assert kv.grow(np.array([0]), np.array([start]), np.array([start + 1]))
    names = [bytes([i]) for i in range(5)]
    kv.publish_next(np.array([0]), [names[:1]])
    kv.publish(0, names, 2)
    assert [kv.pool.find(0, name) for name in names[:2]] == [None, None]
    kv.publish(0, names, 5)
    assert None not in [kv.pool.find(0, name) for name in names[3:]]
    kv.check_invariants()


@pytest.mark.parametrize("writers", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_a_write_into_a_shared_block_copies_it_first(writers):
    """Once for each writer, but not for the last owner: three samples need two copies, not three.
    Which of them wrote first must not matter, the source of the fork included."""
    kv = KVManager(make_layout(((None, 1), (8, 1)), 4), 20, 3, 16)
    assert kv.grow(np.array([0]), np.array([0]), np.array([6]))
    kv.fork(0, 1)
    kv.fork(0, 2)
    kv.drain()
    slots = np.array(writers)
    available = kv.pool.num_available
    assert kv.grow(slots, np.full(len(slots), 6), np.full(len(slots), 7))
    updates = kv.drain()
    num_copies = min(len(writers), 2)
    assert len(updates.copy_src) == num_copies * 2
    assert kv.pool.num_available == available - num_copies * 2
    shared = {
        int(table[1]) for slot in range(3) if slot not in writers for table in kv.tables(slot)
    }
    for slot in writers[:2]:
        assert not shared & {int(table[1]) for table in kv.tables(slot)}


def test_dropping_the_cache_leaves_free_blocks():
    kv, names = _published(num_blocks=4)
    kv.free(0)
    kv.pool.drop_cached()
    assert (kv.pool.num_free, kv.prefixes.lookup(names, 100).num_tokens // 4) == (4, 0)
    kv.check_invariants()


KINDS = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(1, 9)), st.sampled_from([1, 1, 2, 3])),
    min_size=1,
    max_size=3,
).map(tuple)
"""Window, and names per block, of each group."""


@machine_settings(examples=300)
@given(
    kinds=KINDS,
    block_size=st.integers(1, 4),
    missing=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=8),
    states=st.one_of(st.none(), st.sets(st.integers(1, 6))),
    max_tokens=st.integers(0, 26),
)
def test_prefix_hit_is_the_longest_that_every_group_has(
    kinds, block_size, missing, states, max_tokens
):
    """Brute force over lengths: every token that the next query may see must be there, each group
    has a whole page, and the recurrent state, if there is one, was kept."""
    length = 6
    layout = make_layout(kinds, block_size, has_states=states is not None)
    kv = KVManager(layout, layout.blocks_for(length * block_size), 2, length * block_size, 0, 9)
    names = [bytes([i]) for i in range(length)]
    owned: dict[tuple[int, int], int] = {}
    for index, (_, step) in enumerate(kinds):
        for place in range(length // step):
            block = kv.pool.allocate()
            if (index, place) not in missing:
                kv.pool.publish(block, index, names[(place + 1) * step - 1])
                owned[index, place] = block
    for count in states or ():
        assert kv.states is not None
        kv.states.save(names[count - 1])

    def is_cached(num_names: int) -> bool:
        query = num_names * block_size
        return (
            query <= max_tokens
            and not any(num_names % step for _, step in kinds)
            and (states is None or num_names in {0, *states})
            and all(
                (group, position // (step * block_size)) in owned
                for group, (window, step) in enumerate(kinds)
                for position in range(0 if window is None else max(query - window + 1, 0), query)
            )
        )

    hit = kv.prefixes.lookup(names, max_tokens)
    assert hit.num_tokens == block_size * max(n for n in range(length + 1) if is_cached(n))
    assert (hit.checkpoint is not None) == (states is not None and hit.num_tokens > 0)
    for group, blocks in enumerate(hit.blocks):
        assert len(blocks) == layout.groups[group].blocks_for(hit.num_tokens)
        for index, block in enumerate(blocks):
            assert block is None or block == owned[group, index]


@machine_settings(examples=200)
@given(
    kinds=KINDS,
    block_size=st.integers(1, 5),
    chunks=st.lists(st.integers(1, 6), min_size=1, max_size=12),
)
def test_most_blocks_bounds_what_growing_takes(kinds, block_size, chunks):
    """The admission proof rests on it. It is also tight: no chunks need 2 blocks less per group."""
    total = sum(chunks)
    layout = make_layout(kinds, block_size)
    kv = KVManager(layout, 100 * len(kinds), 1, total)
    done = most = 0
    for chunk in chunks:
        assert kv.grow(np.array([0]), np.array([done]), np.array([done + chunk]))
        done += chunk
        most = max(most, kv.num_held_blocks(0))
        assert kv.num_held_blocks(0) <= layout.most_blocks(done, max(chunks))
    assert most <= layout.most_blocks(total, max(chunks))


def test_hash_depends_on_everything_that_changes_kv():
    """Tenant, key, weights, block boundaries, and every token before."""
    tokens = np.arange(16, dtype=np.int32)

    def names(hasher: BlockHasher, salt: str = "", ids: np.ndarray = tokens) -> list[bytes]:
        chain: list[bytes] = []
        hasher.extend(chain, ids, hasher.root(salt))
        return chain

    plain = names(BlockHasher(4, b"key"))
    changed = tokens.copy()
    changed[0] = 99
    others = [
        names(BlockHasher(4, b"key"), salt="tenant"),
        names(BlockHasher(4, b"another key")),
        names(BlockHasher(4, b"key", weights_version=1)),
        names(BlockHasher(4, b"key"), ids=changed),
        names(BlockHasher(8, b"key")),
    ]
    every = [*plain, *(name for chain in others for name in chain)]
    assert len(set(every)) == len(every) == 4 * 5 + 2
    assert names(BlockHasher(4, b"key"), ids=tokens.astype(np.int64)[:11]) == plain[:2]


def test_extending_a_chain_equals_hashing_at_once():
    hasher, tokens = BlockHasher(4, b"key"), np.arange(40, dtype=np.int32)
    whole: list[bytes] = []
    grown: list[bytes] = []
    hasher.extend(whole, tokens, hasher.root())
    for end in range(41):
        hasher.extend(grown, tokens[:end], hasher.root())
    assert grown == whole


def _with_states(num_checkpoints: int) -> tuple[KVManager, list[bytes]]:
    """A slot that has published blocks of one token each."""
    layout = make_layout(((None, 1),), 1, has_states=True)
    kv = KVManager(layout, 8, 2, 8, num_checkpoints=num_checkpoints)
    names = [bytes([i]) for i in range(4)]
    assert kv.grow(np.array([0]), np.array([0]), np.array([4]))
    kv.publish(0, names, 4)
    kv.drain()
    return kv, names


def test_a_state_from_which_somebody_starts_is_replaced_last():
    kv, names = _with_states(2)
    for name in names[:2]:
        kv.save_state(0, name)
    kv.enter(1, kv.prefixes.lookup(names, 1))
    kv.save_state(0, names[2])
    assert kv.states is not None
    assert [kv.states.find(name) is None for name in names] == [False, True, False, True]
    kv.check_invariants()


def test_of_two_states_for_one_checkpoint_a_plan_saves_the_last():
    kv, names = _with_states(1)
    kv.save_state(0, names[0])
    kv.save_state(1, names[1])
    updates = kv.drain()
    assert (updates.save_slot, updates.save_checkpoint) == ([1], [0])


def test_a_row_that_enters_saves_its_state_in_the_same_plan():
    """Its tables need no updates, since it brings them along; its state does."""
    kv, names = _with_states(1)
    kv.save_state(0, names[0])
    kv.forget_updates({0})
    assert kv.drain().save_slot == [0]


def test_states_are_those_of_the_counts():
    """Turns red when a map of blocks shows another state than the counts."""
    pool = BlockPool(6, 1)
    used, shared, named, free = pool.allocate_many(4)
    pool.share([shared])
    pool.publish(named, 0, b"name")
    for block in (named, free):
        pool.release(block)
    states = pool.states()
    assert [chr(states[block]) for block in (used, shared, named, free)] == ["u", "s", "c", "f"]
    counts = [states.count(letter) for letter in b"ucf"]
    assert counts == [pool.num_used - 1, pool.num_cached, pool.num_free]
    assert set(BlockPool(3, 1).states()) == {ord("f")}
