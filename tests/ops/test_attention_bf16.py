"""Paged attention by products of pairs (AVX512_BF16): close to the reference, and the same bits in
any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.test_paged_attention import arguments
from tests.pairs import BY_PAIRS
from tests.profiles import examples

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Case, Team
from quire.ops.attention.paged_batch import PagedBatch, paged_batch
from quire.ops.check import compare

OP = ALL_OPS["paged_attention"]
PROVIDER = OP.provider("cpu_avx512_bf16")
TEAMS = {threads: Team(threads) for threads in (1, 2, 3)}
BF16 = torch.bfloat16
Rows = list[tuple[int, int]]

if (_REASON := PROVIDER.unavailable(detect_platform())) is not None:
    pytest.skip(_REASON, allow_module_level=True)


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """(query_len, seq_len): decode, prompts, and chunks behind what is there."""
    queries = st.integers(1, 3) | st.integers(1, 90)
    row = st.tuples(queries, st.integers(0, 600)).map(lambda pair: (pair[0], sum(pair)))
    return draw(st.lists(row, min_size=1, max_size=4))


def over_shapes(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test over batches of any shape that these kernels take."""
    return examples(25)(
        given(
            rows=rows(),
            kv_heads=st.sampled_from([1, 2, 3, 8]),
            group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 17]),
            head_dim=st.sampled_from([32, 64, 96, 128, 160, 256]),
            block_size=st.sampled_from([1, 5, 16, 24, 64, 128]),
            window=st.none() | st.integers(1, 700),
            seed=st.integers(0, 2**31),
        )(test)
    )


@over_shapes
def test_any_shape_equals_the_reference(
    rows: Rows,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    seed: int,
) -> None:
    """Within what rounding weights to bfloat16 may do. The pool is NaN where no token is. Turns red
    on a wrong mask, pair, order of lanes, page or span."""
    batch = random_batch(rows, kv_heads, group, head_dim, block_size, seed)
    case = Case("random", (*arguments(batch), head_dim**-0.5), {"window": window})
    assert PROVIDER.tolerance is not None
    op = replace(OP, tolerance=PROVIDER.tolerance)
    assert compare(op, PROVIDER.load(TEAMS[2]), case) is None


@over_shapes
def test_a_query_has_the_same_bits_in_any_batch_and_chunk(
    rows: Rows,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    seed: int,
) -> None:
    """Batched = alone, chunked = whole, decode = the row of a prompt, on any number of threads.
    Turns red when a sum depends on which path, tile or chunk of keys computes it."""
    batch = random_batch(rows, kv_heads, group, head_dim, block_size, seed)
    whole = PROVIDER.load(TEAMS[2])(*arguments(batch), 0.1, window)
    for row, (queries, _) in enumerate(rows):
        start = int(batch.query_start_loc[row])
        for low, high in {(0, queries), (queries - 1, queries), (queries // 3, queries // 2 + 1)}:
            for threads in (1, 3):
                alone = attend(batch, low, high, window, row=row, threads=threads)
                assert torch.equal(alone, whole[start + low : start + high])


def test_bits_do_not_depend_on_the_pages() -> None:
    """Turns red when a chunk of keys or a pair of tokens follows the blocks of the cache."""
    results: list[torch.Tensor] = []
    for block_size in (16, 5, 128):
        batch = random_batch([(70, 230), (1, 99)], 2, 2, 64, block_size, seed=0)
        dense = random_batch([(70, 230), (1, 99)], 2, 2, 64, 16, seed=1)
        for row in range(2):
            for token in range(int(dense.seq_lens[row])):
                to = int(batch.block_table[row, token // block_size]), token % block_size
                source = int(dense.block_table[row, token // 16]), token % 16
                batch.k_cache[to] = dense.k_cache[source]
                batch.v_cache[to] = dense.v_cache[source]
        batch.q.copy_(dense.q)
        results.append(PROVIDER.load(TEAMS[2])(*arguments(batch), 0.1))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("queries", [1, 200])
def test_weights_that_are_rounded_do_not_move_a_constant(queries: int) -> None:
    """The weights of a query sum to 1 as they meet V. Turns red when the sum that divides is of
    weights that were not rounded."""
    batch = random_batch([(200, 200)], 2, 2, 64, 16, seed=0)
    value = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).to(BF16)
    batch.v_cache[:] = value
    result = attend(batch, 200 - queries, 200)
    assert torch.equal(result, value.repeat_interleave(2, dim=0).expand_as(result))


@BY_PAIRS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("broken", [300, 301])
@pytest.mark.parametrize("window", [None, 40])
def test_a_broken_value_reaches_its_dim_of_those_who_see_it_only(
    window: int | None, broken: int, bad: float
) -> None:
    """In a prompt, in decode and where spans are computed apart. Turns red when a weight of 0 is
    all that keeps V from a query, or when what others compute changes."""
    length = 560
    batch = random_batch([(length, length)], 2, 2, 64, 16, seed=0)
    clean = attend(batch, 0, length, window)
    batch.v_cache[int(batch.block_table[0, broken // 16]), broken % 16, 1, 3] = bad
    result = attend(batch, 0, length, window)
    position = torch.arange(length)
    sees = (position >= broken) & (position < broken + (window or length))
    assert torch.equal(result[~sees], clean[~sees])
    assert torch.equal(result[:, :2], clean[:, :2])
    assert not result[sees, 2:, 3].isfinite().any()
    others = [dim for dim in range(64) if dim != 3]
    assert torch.equal(result[..., others], clean[..., others])
    for at in (broken - 1, broken, broken + 1, broken + 50, length - 1):
        for threads in (1, 3):
            alone = attend(batch, at, at + 1, window, threads=threads)
            assert torch.equal(alone.nan_to_num(7.0), result[at : at + 1].nan_to_num(7.0))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_broken_key_reaches_those_who_see_it_only(bad: float) -> None:
    """Turns red when a score that is no number gets past the mask."""
    batch = random_batch([(90, 90)], 1, 2, 64, 16, seed=0)
    clean = attend(batch, 0, 90)
    broken = 41
    batch.k_cache[int(batch.block_table[0, broken // 16]), broken % 16] = bad
    result = attend(batch, 0, 90)
    assert torch.equal(result[:broken], clean[:broken])
    assert result[broken:].isnan().all()


def random_batch(
    rows: Rows, kv_heads: int, group: int, head_dim: int, block_size: int, seed: int
) -> PagedBatch:
    return paged_batch(
        torch.Generator().manual_seed(seed),
        rows,
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
    *,
    row: int = 0,
    threads: int = 1,
) -> torch.Tensor:
    """Queries low … high - 1 of one row alone, over the keys up to there."""
    start, end = batch.query_start_loc[row : row + 2].tolist()
    later = end - start - high
    return PROVIDER.load(TEAMS[threads])(
        batch.q[start + low : start + high],
        batch.k_cache,
        batch.v_cache,
        batch.block_table[row : row + 1],
        torch.tensor([0, high - low], dtype=torch.int32),
        batch.seq_lens[row : row + 1] - later,
        0.1,
        window,
    )
