"""Paged attention kernels: equal to the reference on any shape, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pairs import BY_PAIRS
from tests.profiles import examples

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Case, Provider, Team
from quire.ops.attention.paged_batch import PagedBatch, paged_batch, random_key_bias
from quire.ops.check import compare

OP = ALL_OPS["paged_attention"]
TEAMS = {threads: Team(threads) for threads in (1, 2)}
PLATFORM = detect_platform()
Kernel = Callable[..., torch.Tensor]
SCORED = ("sinks", "soft_cap", "alibi_slopes")


@pytest.fixture(params=OP.providers, ids=lambda provider: provider.name)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    reason = request.param.unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(f"{request.param.name}: {reason}")
    return request.param.load(Team(2))


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 70), st.integers(0, 600)).map(
                lambda pair: (pair[0], pair[0] + pair[1])
            ),
            min_size=1,
            max_size=3,
        )
    )
    return {
        "rows": rows,
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        "head_dim": draw(st.sampled_from([8, 32, 40, 64, 80, 128, 192, 256])),
        "block_size": draw(st.sampled_from([1, 2, 5, 16, 32, 64, 128])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "cache_dtype": draw(st.sampled_from([None, torch.bfloat16, torch.int8])),
    }


@examples(12)
@given(
    shape=shapes(),
    window=st.none() | st.integers(1, 700),
    seed=st.integers(0, 2**31),
    threads=st.sampled_from([1, 2]),
    scored=st.sets(st.sampled_from(SCORED)),
)
def test_any_shape_equals_the_reference(
    shape: dict[str, object], window: int | None, seed: int, threads: int, scored: set[str]
) -> None:
    """The pool is NaN where no token is. Turns red on a wrong mask, tail, group, page or span, or
    the cap or slope of another head, query or key."""
    batch = paged_batch(torch.Generator().manual_seed(seed), **shape)  # type: ignore[arg-type]
    options = {"window": window, **scales(batch), **score_options(scored, batch.q.shape[1])}
    case = Case("random", (*arguments(batch), batch.q.shape[-1] ** -0.5), options)
    for provider in OP.providers:
        if provider.unavailable(PLATFORM) is None:
            op = replace(OP, tolerance=provider.tolerance or OP.tolerance)
            difference = compare(op, provider.load(TEAMS[threads]), case)
            assert difference is None, f"{provider.name}: {difference}"


def score_options(names: Collection[str], num_heads: int) -> dict[str, object]:
    """Sinks, of which some are above all scores; a cap near them; slopes of which one is 0."""
    generator = torch.Generator().manual_seed(7)
    every = {
        "sinks": 4 * torch.randn(num_heads, generator=generator),
        "soft_cap": 2.0,
        "alibi_slopes": torch.linspace(0.3, 0.0, num_heads),
    }
    return {name: every[name] for name in names}


# Positions around the edges of key blocks (64), spans (512) and tiles.
CUTS = ((0, 1), (1, 64), (63, 66), (100, 107), (511, 513), (0, 513), (512, 1200), (1199, 1200))


@BY_PAIRS
@pytest.mark.parametrize(
    ("window", "scored"),
    [
        (None, ()),
        (1, ()),
        (70, ("sinks",)),
        (600, ()),
        (None, ("sinks",)),
        (70, ("soft_cap", "alibi_slopes")),
        (None, ("alibi_slopes",)),
    ],
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "cache_dtype"),
    [
        (4, 2, 128, 16, torch.bfloat16, torch.bfloat16),
        (3, 1, 96, 5, torch.bfloat16, torch.bfloat16),
        (7, 1, 72, 5, torch.float32, torch.float32),
        (32, 2, 64, 128, torch.float16, torch.float16),
        (3, 3, 40, 32, torch.float32, torch.float32),
        (6, 2, 72, 16, torch.bfloat16, torch.int8),
        (8, 2, 80, 16, torch.bfloat16, torch.int8),
        (16, 1, 40, 64, torch.bfloat16, torch.int8),
        (16, 1, 64, 64, torch.float32, torch.int8),
    ],
)
def test_a_query_has_the_same_bits_alone_and_in_any_chunk(
    kernel: Kernel,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    window: int | None,
    scored: tuple[str, ...],
) -> None:
    """Batched = alone, chunked = whole, decode = prefill. Turns red when the order of a query's
    sums depends on its tile, its batch or the number of threads."""
    length = 1200
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(5, 700), (length, length), (1, 300)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    options = scales(batch) | score_options(scored, num_heads)
    whole = kernel(*arguments(batch), 0.1, window, **options)
    for low, high in CUTS:
        chunk = slice(5 + low, 5 + high)
        alone = kernel(
            batch.q[chunk],
            batch.k_cache,
            batch.v_cache,
            batch.block_table[1:2],
            torch.tensor([0, high - low], dtype=torch.int32),
            torch.tensor([high], dtype=torch.int32),
            0.1,
            window,
            **options,
        )
        assert torch.equal(alone, whole[chunk]), f"queries {low} to {high}"
    last = kernel(
        batch.q[-1:],
        batch.k_cache,
        batch.v_cache,
        batch.block_table[2:],
        torch.tensor([0, 1], dtype=torch.int32),
        batch.seq_lens[2:],
        0.1,
        window,
        **options,
    )
    assert torch.equal(last, whole[-1:])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (6, 2, 72, torch.bfloat16),
        (7, 1, 64, torch.bfloat16),
        (20, 1, 32, torch.bfloat16),
        (20, 1, 40, torch.float32),
        (3, 3, 64, torch.float32),
    ],
)
def test_added_biases_have_the_same_bits_alone_and_in_any_chunk(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Turns red when what a key lacks is summed by the rows of a tile, or by its block."""
    generator, length = torch.Generator().manual_seed(0), 600
    batch = paged_batch(
        generator,
        [(5, 300), (length, length)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        cache_dtype=torch.int8,
    )
    options = {
        **scales(batch),
        "key_bias": random_key_bias(generator, num_kv_heads, head_dim, length),
        "value_bias": torch.randn(num_kv_heads, head_dim, generator=generator),
    }
    for provider in OP.providers:
        if "key_bias" in provider.lacks or provider.unavailable(PLATFORM) is not None:
            continue
        kernel = provider.load(TEAMS[2])
        whole = kernel(*arguments(batch), 0.1, **options)
        for low, high in ((0, 1), (1, 64), (63, 66), (100, 107), (511, 513), (599, 600)):
            alone = kernel(
                batch.q[5 + low : 5 + high],
                batch.k_cache,
                batch.v_cache,
                batch.block_table[1:],
                torch.tensor([0, high - low], dtype=torch.int32),
                torch.tensor([high], dtype=torch.int32),
                0.1,
                **options,
            )
            assert torch.equal(alone, whole[5 + low : 5 + high]), f"{provider.name}: {low}, {high}"


@pytest.mark.parametrize("provider", OP.providers, ids=lambda provider: provider.name)
def test_bits_do_not_depend_on_threads(provider: Provider) -> None:
    """Turns red when long sequences are cut by the number of threads."""
    if (reason := provider.unavailable(PLATFORM)) is not None:
        pytest.skip(f"{provider.name}: {reason}")
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(1, 2000)],
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        block_size=16,
        dtype=torch.float32,
    )
    results = [provider.load(Team(threads))(*arguments(batch), 0.125) for threads in (1, 2, 3, 8)]
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_rows_without_queries_are_nothing_to_do(kernel: Kernel) -> None:
    """Turns red when long rows that are only present, not computed, ask for empty scratch."""
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(0, 1100), (0, 0)],
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        block_size=16,
        dtype=torch.float32,
    )
    assert kernel(*arguments(batch), 0.2).shape == (0, 2, 16)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_nan_stays_in_its_own_row(kernel: Kernel, cache_dtype: torch.dtype) -> None:
    """Turns red when one poisoned request reaches its neighbours, or its NaN is hidden."""
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(2, 40), (1, 33)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        block_size=8,
        dtype=torch.float32,
        cache_dtype=cache_dtype,
    )
    block = int(batch.block_table[0, 1])
    poisoned = batch.k_cache if batch.k_scale is None else batch.k_scale
    poisoned[block, 3] = float("nan")
    result = kernel(*arguments(batch), 0.2, **scales(batch))
    assert result[:2].isnan().all()
    assert result[2].isfinite().all()


@BY_PAIRS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("head_dim", "cache_dtype"), [(40, torch.bfloat16), (64, torch.bfloat16), (40, torch.int8)]
)
def test_a_broken_token_stays_hidden_from_earlier_queries(
    kernel: Kernel, head_dim: int, cache_dtype: torch.dtype, window: int | None, bad: float
) -> None:
    """Turns red when a weight of 0 is all that keeps a later V, or one that the window has left,
    from a query of the same tile: 0 · inf is NaN."""
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(30, 70)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=8,
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
    )
    broken = 53
    block, offset = int(batch.block_table[0, broken // 8]), broken % 8
    poisoned = batch.v_cache if batch.v_scale is None else batch.v_scale
    poisoned[block, offset] = bad
    result = kernel(*arguments(batch), 0.2, window, **scales(batch))
    position = torch.arange(40, 70)
    sees = (position >= broken) & (position < broken + (window or 1000))
    assert result[~sees].isfinite().all()
    assert not result[sees].isfinite().any()


def test_very_large_and_equal_scores_stay_finite(kernel: Kernel) -> None:
    """Turns red when the softmax overflows or a row's maximum is not subtracted."""
    batch = paged_batch(
        torch.Generator().manual_seed(0),
        [(1, 600)],
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        block_size=16,
        dtype=torch.float32,
    )
    batch.k_cache.mul_(1e4)
    case = Case("large", (*arguments(batch), 10.0))
    assert compare(OP, kernel, case) is None
    batch.k_cache.mul_(0)
    assert compare(OP, kernel, Case("equal", (*arguments(batch), 10.0))) is None


def arguments(batch: PagedBatch) -> tuple[torch.Tensor, ...]:
    return (
        batch.q,
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
    )


def scales(batch: PagedBatch) -> dict[str, torch.Tensor | None]:
    return {"k_scale": batch.k_scale, "v_scale": batch.v_scale}
