"""Paged attention over one plane, of which V is the first part of K: equal to the reference on any
shape, and the same bits in any batch and chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.test_paged_attention import arguments, scales, score_options
from tests.pairs import BY_PAIRS
from tests.profiles import examples

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Case, Provider, Team
from quire.ops.attention.paged_attention import WIDTHS
from quire.ops.attention.paged_batch import PagedBatch, paged_batch
from quire.ops.check import compare

OP = ALL_OPS["paged_attention"]
PLATFORM = detect_platform()
PROVIDERS = [each for each in OP.providers if WIDTHS not in each.lacks]
TEAMS = {threads: Team(threads) for threads in (1, 2, 3)}
Kernel = Callable[..., torch.Tensor]
BF16, INT8 = torch.bfloat16, torch.int8
Rows = list[tuple[int, int]]

HEADS = st.sampled_from([1, 4, 7, 8, 16, 20, 40, 64])
WIDTH_PAIRS = st.sampled_from([(576, 512), (288, 256), (96, 64), (64, 32), (48, 32), (25, 20)])
BLOCK_SIZES = st.sampled_from([1, 5, 16, 24, 64, 128])
DTYPES = st.sampled_from([torch.float32, BF16, torch.float16])
CACHE_DTYPES = st.sampled_from([None, INT8])


@pytest.fixture(params=PROVIDERS, ids=lambda provider: provider.name)
def provider(request: pytest.FixtureRequest) -> Provider:
    if (reason := request.param.unavailable(PLATFORM)) is not None:
        pytest.skip(f"{request.param.name}: {reason}")
    return request.param


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """(query_len, seq_len): decode, prompts, and chunks behind what is there."""
    queries = st.integers(1, 3) | st.integers(0, 70)
    row = st.tuples(queries, st.integers(0, 600)).map(lambda pair: (pair[0], sum(pair)))
    return draw(st.lists(row, min_size=1, max_size=3))


@examples(20)
@given(
    rows=rows(),
    heads=HEADS,
    widths=WIDTH_PAIRS,
    block_size=BLOCK_SIZES,
    dtype=DTYPES,
    cache_dtype=CACHE_DTYPES,
    window=st.none() | st.integers(1, 700),
    scored=st.sets(st.sampled_from(["sinks", "soft_cap", "alibi_slopes"])),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_the_reference(
    rows: Rows,
    heads: int,
    widths: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    window: int | None,
    scored: set[str],
    threads: int,
    seed: int,
) -> None:
    """The pool is NaN where no token is. Turns red on a wrong width, lane, mask, tail, page, span
    or scale."""
    batch = plane_batch(rows, heads, widths, block_size, dtype, cache_dtype, seed)
    options = {"window": window, **scales(batch), **score_options(scored, heads)}
    case = Case("random", (*arguments(batch), widths[0] ** -0.5), options)
    for provider in PROVIDERS:
        if provider.unavailable(PLATFORM) is None:
            op = replace(OP, tolerance=provider.tolerance or OP.tolerance)
            difference = compare(op, provider.load(TEAMS[threads]), case)
            assert difference is None, f"{provider.name}: {difference}"


@examples(8)
@given(
    heads=HEADS,
    widths=WIDTH_PAIRS,
    block_size=BLOCK_SIZES,
    dtype=DTYPES,
    cache_dtype=CACHE_DTYPES,
    length=st.integers(2, 700),
    cuts=st.sets(st.integers(1, 699), max_size=4),
    seed=st.integers(0, 2**31),
)
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    heads: int,
    widths: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    length: int,
    cuts: set[int],
    seed: int,
) -> None:
    """Between neighbours in one step and alone in chunks, with 1, 2 and 3 threads. Turns red when
    the order of a query's sums depends on its tile, its batch or the number of threads."""
    given_rows = [(2, 90), (length, length), (1, 300)]
    batch = plane_batch(given_rows, heads, widths, block_size, dtype, cache_dtype, seed)
    ends = [*sorted(cut for cut in cuts if cut < length), length]
    for provider in PROVIDERS:
        if provider.unavailable(PLATFORM) is not None:
            continue
        whole = attend(provider.load(TEAMS[2]), batch, 0, 2 + length + 1, given_rows, slice(None))
        for threads, low, high in zip((1, 2, 3) * 2, [0, *ends], ends, strict=False):
            kernel = provider.load(TEAMS[threads])
            part = attend(kernel, batch, 2 + low, 2 + high, [(high - low, high)], slice(1, 2))
            assert torch.equal(part, whole[2 + low : 2 + high]), f"{provider.name}: {low}, {high}"
        last = attend(provider.load(TEAMS[3]), batch, -1, None, [(1, 300)], slice(2, 3))
        assert torch.equal(last, whole[-1:]), provider.name


@BY_PAIRS
@pytest.mark.parametrize("heads", [4, 16, 20])
@pytest.mark.parametrize("widths", [(96, 64), (48, 32)])
@pytest.mark.parametrize("cache_dtype", [BF16, INT8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["latent", "rest"])
def test_a_broken_token_reaches_only_those_that_see_it(
    provider: Provider,
    heads: int,
    widths: tuple[int, int],
    cache_dtype: torch.dtype,
    bad: float,
    part: str,
) -> None:
    """Turns red when a weight of 0 is all that keeps a later token from a query of the same tile,
    or when NaN is hidden."""
    batch = plane_batch([(30, 70), (2, 50)], heads, widths, 16, BF16, cache_dtype, 0)
    broken = 53
    block, offset = int(batch.block_table[0, broken // 16]), broken % 16
    if batch.k_scale is not None:
        batch.k_scale[block, offset, 0 if part == "latent" else 1] = bad
    else:
        batch.k_cache[block, offset, 0, 3 if part == "latent" else -3] = bad
    result = provider.load(TEAMS[2])(*arguments(batch), 0.2, **scales(batch))
    sees = torch.arange(40, 70) >= broken
    assert result[:30][~sees].isfinite().all()
    if part == "latent" or bad != float("inf"):  # a score of -inf is a weight of 0
        assert not result[:30][sees].isfinite().all(-1).any()
    assert result[30:].isfinite().all()


def test_two_scales_are_those_of_their_parts() -> None:
    """The reference over an int8 plane equals itself over the numbers that the plane stands for.
    Turns red when it takes one scale for the other."""
    batch = plane_batch([(9, 40)], 4, (48, 32), 16, torch.float32, INT8, 0)
    assert batch.k_scale is not None
    assert not torch.equal(batch.k_scale[..., 0], batch.k_scale[..., 1])
    plane = batch.k_cache.float()
    plane[..., :32] *= batch.k_scale[..., None, :1]
    plane[..., 32:] *= batch.k_scale[..., None, 1:]
    expected = OP.reference(
        batch.q,
        plane,
        plane[..., :32],
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        0.2,
    )
    got = OP.reference(*arguments(batch), 0.2, **scales(batch))
    assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)


def plane_batch(
    rows: Rows,
    heads: int,
    widths: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    seed: int,
) -> PagedBatch:
    """widths: elements of K, and of V, which are the first of these."""
    return paged_batch(
        torch.Generator().manual_seed(seed),
        rows,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=widths[0],
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        value_dim=widths[1],
    )


def attend(
    kernel: Kernel, batch: PagedBatch, low: int, high: int | None, rows: Rows, tables: slice
) -> torch.Tensor:
    """Compute the queries low … high - 1 of a batch as those of `rows`, with these block tables."""
    starts = torch.tensor([0, *(count for count, _ in rows)], dtype=torch.int32).cumsum(0).int()
    return kernel(
        batch.q[low:high],
        batch.k_cache,
        batch.v_cache,
        batch.block_table[tables],
        starts,
        torch.tensor([length for _, length in rows], dtype=torch.int32),
        0.1,
        **scales(batch),
    )
