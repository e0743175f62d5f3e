"""Paged attention on tile registers (AMX): equal to the reference, and the same bits in any batch.

Without such a processor the instructions are emulated (tile_emulator.cpp). With one, the tests of
test_paged_attention.py meet this kernel too.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.test_paged_attention import arguments
from tests.ops.tile_emulator import (
    TILE_ATTENTION,
    has_tiles,
    tile_provider,
    tiles_unavailable,
)
from tests.profiles import examples

from quire.ops import Case, Team
from quire.ops.attention.paged_batch import PagedBatch, paged_batch, random_last_key
from quire.ops.check import check_provider, compare

pytestmark = pytest.mark.timeout(900)  # compiling takes minutes on a slow machine
BF16 = torch.bfloat16

if (_REASON := tiles_unavailable()) is not None:
    pytest.skip(_REASON, allow_module_level=True)


def test_every_case_of_the_operation_equals_the_reference(tiles: ctypes.CDLL) -> None:
    """Turns red when the library on tiles computes something else."""
    before = tiles.emulator_count()
    report = check_provider(TILE_ATTENTION, tile_provider(TILE_ATTENTION))
    assert report.ok, report.failures
    assert has_tiles() or tiles.emulator_count() > before


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(query_len, seq_len): decode, prompts, and chunks behind what is there."""
    queries = st.integers(1, 3) | st.integers(0, 70)
    row = st.tuples(queries, st.integers(0, 600)).map(lambda pair: (pair[0], sum(pair)))
    return draw(st.lists(row, min_size=1, max_size=3))


@examples(25)
@given(
    rows=rows(),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 17]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 5, 16, 24, 32, 48, 64, 128]),
    window=st.none() | st.integers(1, 700),
    spans=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_the_reference(
    tiles: ctypes.CDLL,
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    spans: bool,
    threads: int,
    seed: int,
) -> None:
    """The pool is NaN where no token is. spans: whether queries see keys after their own. Turns red
    on a wrong lane, mask, tail, page or span."""
    generator = torch.Generator().manual_seed(seed)
    batch = paged_batch(
        generator,
        rows,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=BF16,
    )
    last_key = random_last_key(generator, rows) if spans else None
    options = {"window": window, "last_key": last_key}
    case = Case("random", (*arguments(batch), head_dim**-0.5), options)
    provider = tile_provider(TILE_ATTENTION)
    assert provider.tolerance is not None
    op = replace(TILE_ATTENTION, tolerance=provider.tolerance)
    assert compare(op, provider.load(Team(threads)), case) is None


def test_weights_that_are_rounded_do_not_move_a_constant(tiles: ctypes.CDLL) -> None:
    """The weights of a query sum to 1 as they meet V. Turns red when the sum that divides is of
    weights that were not rounded."""
    batch = prompt(200, kv_heads=2, group=2)
    value = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    batch.v_cache[:] = value
    result = attend(batch, 0, 200)
    expected = value.repeat_interleave(2, dim=0).expand_as(result)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim", "block_size"), [(2, 3, 64, 16), (5, 1, 96, 5), (1, 8, 32, 48)]
)
def test_a_query_has_the_same_bits_alone_and_in_any_chunk(
    tiles: ctypes.CDLL,
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
) -> None:
    """Batched = alone, chunked = whole, decode = prefill, and one thread = three. Turns red when a
    sum depends on how lanes, heads and tokens share the registers."""
    length = 560
    batch = prompt(length, kv_heads=kv_heads, group=group, head_dim=head_dim, block_size=block_size)
    whole = attend(batch, 0, length, window)
    for low, high in ((0, 1), (1, 64), (63, 66), (100, 107), (511, 513), (0, 530), (559, 560)):
        for threads in (1, 3):
            part = attend(batch, low, high, window, threads)
            assert torch.equal(part, whole[low:high]), f"queries {low} to {high}, {threads} threads"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 40])
def test_a_broken_token_reaches_those_who_see_it_only(
    tiles: ctypes.CDLL, window: int | None, bad: float
) -> None:
    """In a prompt, in decode and where spans are computed apart. Turns red when a weight of 0 is
    all that keeps V from a query, or when what others compute changes."""
    length, broken = 560, 300
    batch = prompt(length, kv_heads=2, group=2)
    clean = attend(batch, 0, length, window)
    block, offset = int(batch.block_table[0, broken // 16]), broken % 16
    batch.v_cache[block, offset, 1, 3] = bad
    result = attend(batch, 0, length, window)
    position = torch.arange(length)
    sees = (position >= broken) & (position < broken + (window or length))
    assert torch.equal(result[~sees], clean[~sees])
    assert torch.equal(result[:, :2], clean[:, :2])
    assert not result[sees, 2:].isfinite().all(-1).any()
    for at in (broken - 1, broken, broken + 50, length - 1):
        for threads in (1, 3):
            alone = attend(batch, at, at + 1, window, threads)
            assert torch.equal(alone.isnan(), result[at : at + 1].isnan())
            assert torch.equal(alone[:, :2], result[at : at + 1, :2])


@pytest.mark.parametrize("window", [None, 40])
def test_spans_see_what_follows_and_nothing_beyond(tiles: ctypes.CDLL, window: int | None) -> None:
    """Same bits in any chunk that has the rest of a span, and for causal rows those of a call
    without last keys. Turns red when a lane ends at the position of its query, or when a token
    after a span that is not finite reaches it."""
    length, broken = 420, 300
    position = torch.arange(length)
    last_key = ((position // 70 + 1) * 70 - 1).int()
    batch = prompt(length, kv_heads=2, group=2)
    whole = attend(batch, 0, length, window, last_key=last_key)
    for low, high in ((0, 70), (30, 70), (100, 210), (0, 350)):
        for threads in (1, 3):
            part = attend(batch, low, high, window, threads, last_key=last_key)
            assert torch.equal(part, whole[low:high]), f"queries {low} to {high}"
    causal = attend(batch, 0, length, window)
    assert torch.equal(attend(batch, 0, length, window, last_key=position.int()), causal)
    batch.v_cache[int(batch.block_table[0, broken // 16]), broken % 16] = float("nan")
    result = attend(batch, 0, length, window, last_key=last_key)
    sees = (last_key >= broken) & (position < broken + (window or length))
    assert torch.equal(result[~sees], whole[~sees])
    assert not result[sees].isfinite().any()


def test_tiles_are_free_after_a_call(tiles: ctypes.CDLL) -> None:
    """Turns red when a thread keeps its tiles configured."""
    batch = prompt(70, kv_heads=2, group=2)
    for low in (0, 69):
        attend(batch, low, 70)
        config = ctypes.create_string_buffer(b"\1" * 64, 64)
        tiles.probe_configuration(config)
        assert config.raw == bytes(64)


def prompt(
    length: int, *, kv_heads: int, group: int, head_dim: int = 64, block_size: int = 16
) -> PagedBatch:
    return paged_batch(
        torch.Generator().manual_seed(0),
        [(length, length)],
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=BF16,
    )


def attend(
    batch: PagedBatch,
    low: int,
    high: int,
    window: int | None = None,
    threads: int = 1,
    last_key: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries low … high - 1 of the only row, over the keys up to there."""
    kernel = tile_provider(TILE_ATTENTION).load(Team(threads))
    return kernel(
        batch.q[low:high],
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        torch.tensor([0, high - low], dtype=torch.int32),
        torch.tensor([high], dtype=torch.int32),
        0.1,
        window,
        last_key=None if last_key is None else last_key[low:high],
    )
