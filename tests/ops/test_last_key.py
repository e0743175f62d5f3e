"""Queries that see keys after their own position: bidirectional prompts and spans of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.test_paged_attention import arguments, scales
from tests.pairs import BY_PAIRS
from tests.profiles import examples

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Case, Provider, Team
from quire.ops.attention.paged_batch import (
    PagedBatch,
    paged_batch,
    random_key_bias,
    random_last_key,
)
from quire.ops.check import compare

OP = ALL_OPS["paged_attention"]
PLATFORM = detect_platform()
TEAMS = {threads: Team(threads) for threads in (1, 2, 3)}
Rows = Sequence[tuple[int, int]]
KERNELS = [each for each in OP.providers if "last_key" not in each.lacks]
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
]


@pytest.fixture(params=KERNELS, ids=lambda provider: provider.name)
def provider(request: pytest.FixtureRequest) -> Provider:
    reason = request.param.unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(f"{request.param.name}: {reason}")
    return request.param


@st.composite
def batches(draw: st.DrawFn) -> tuple[PagedBatch, torch.Tensor, torch.Generator]:
    """Decode rows, prompts and chunks behind what is there, with spans of random lengths."""
    queries = st.just(1) | st.integers(0, 90)
    row = st.tuples(queries, st.just(0) | st.integers(0, 600)).map(lambda p: (p[0], sum(p)))
    rows = draw(st.lists(row, min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype, cache_dtype = draw(st.sampled_from(DTYPES))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    batch = paged_batch(
        generator,
        rows,
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 32, 40, 64, 128])),
        block_size=draw(st.sampled_from([1, 5, 16, 64])),
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    return batch, random_last_key(generator, rows), generator


WINDOWS = st.none() | st.integers(1, 700)


@examples(16, deadline=None)
@given(made=batches(), window=WINDOWS, threads=st.sampled_from([1, 2]), biased=st.booleans())
def test_any_spans_equal_the_reference(
    made: tuple[PagedBatch, torch.Tensor, torch.Generator],
    window: int | None,
    threads: int,
    biased: bool,
) -> None:
    """The pool is NaN where no token is. Turns red when a tile masks, skips or fetches keys by the
    position of a query."""
    batch, last_key, generator = made
    _, _, kv_heads, head_dim = batch.k_cache.shape
    options: dict[str, Any] = {"window": window, "last_key": last_key, **scales(batch)}
    if biased and batch.k_scale is not None:
        options["key_bias"] = random_key_bias(generator, kv_heads, head_dim, 700)
        options["value_bias"] = torch.randn(kv_heads, head_dim, generator=generator)
    case = Case("random", (*arguments(batch), head_dim**-0.5), options)
    for provider in KERNELS:
        if provider.unavailable(PLATFORM) is None:
            op = replace(OP, tolerance=provider.tolerance or OP.tolerance)
            difference = compare(op, provider.load(TEAMS[threads]), case)
            assert difference is None, f"{provider.name}: {difference}"


@examples(8, deadline=None)
@given(
    made=batches(),
    window=WINDOWS,
    capped=st.booleans(),
    slanted=st.booleans(),
    drained=st.booleans(),
)
def test_the_reference_is_softmax_over_the_keys_that_a_query_sees(
    made: tuple[PagedBatch, torch.Tensor, torch.Generator],
    window: int | None,
    capped: bool,
    slanted: bool,
    drained: bool,
) -> None:
    """Written out row by row. Turns red when the cap, the slope or the sink of a score is taken for
    other keys, or when the window moves with the last key."""
    batch, last_key, generator = made
    heads = batch.q.shape[1]
    options: dict[str, Any] = {
        "soft_cap": 2.0 if capped else None,
        "alibi_slopes": torch.rand(heads, generator=generator) if slanted else None,
        "sinks": torch.randn(heads, generator=generator) if drained else None,
    }
    got = OP.reference(
        *arguments(batch), 0.2, window, **scales(batch), last_key=last_key, **options
    )
    for row in range(len(batch.seq_lens)):
        start, stop = batch.query_start_loc[row : row + 2].tolist()
        keys, values = tokens_of(batch, row)
        position = len(keys) - stop + torch.arange(start, stop)
        key = torch.arange(len(keys))
        sees = key <= last_key[start:stop, None]
        if window is not None:
            sees &= key > position[:, None] - window
        expected = softmax_over(batch.q[start:stop], keys, values, sees, position, options)
        tolerance = 1e-5 if batch.q.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            got[start:stop].double(), expected, rtol=tolerance, atol=tolerance
        )


def tokens_of(batch: PagedBatch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one row, float64 [N, K, D]."""
    position = torch.arange(int(batch.seq_lens[row]))
    block_size = batch.k_cache.shape[1]
    at = batch.block_table[row].long()[position // block_size], position % block_size
    found: list[torch.Tensor] = []
    for cache, scale in ((batch.k_cache, batch.k_scale), (batch.v_cache, batch.v_scale)):
        tokens = cache[at].double()
        found.append(tokens if scale is None else tokens * scale[at].double().unsqueeze(-1))
    return found[0], found[1]


def softmax_over(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sees: torch.Tensor,
    position: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """q [Q, H, D], keys and values [N, K, D], sees [Q, N], position [Q] → float64 [Q, H, D]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", q.double(), keys) * 0.2
    if options["soft_cap"] is not None:
        scores = options["soft_cap"] * torch.tanh(scores / options["soft_cap"])
    if options["alibi_slopes"] is not None:
        ahead = torch.arange(len(keys)) - position[:, None]
        scores = scores + options["alibi_slopes"].double()[:, None, None] * ahead
    weights = scores.exp() * sees
    total = weights.sum(-1)
    if options["sinks"] is not None:
        total = total + options["sinks"].double().exp()[:, None]
    return torch.einsum("hqn,nhd->qhd", weights / total[..., None], values)


@BY_PAIRS
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
def test_a_whole_prompt_is_full_attention(
    provider: Provider, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """With the end as the last key of all. Turns red when something stays causal."""
    length, heads = 170, 4
    batch = one_prompt(length, dtype, cache_dtype, num_heads=heads)
    last_key = torch.full((length,), length - 1, dtype=torch.int32)
    got = provider.load(TEAMS[2])(*arguments(batch), 0.2, **scales(batch), last_key=last_key)
    keys, values = (each.float().repeat_interleave(2, dim=1) for each in tokens_of(batch, 0))
    q, k, v = (each.transpose(0, 1)[None] for each in (batch.q.float(), keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2)
    tolerance = (provider.tolerance or OP.tolerance)[dtype]
    torch.testing.assert_close(
        got.float(),
        expected[0].transpose(0, 1),
        rtol=max(tolerance.rtol, 1e-4),
        atol=max(tolerance.atol, 1e-4),
    )


@BY_PAIRS
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
def test_a_last_key_at_the_own_position_changes_no_bit(
    provider: Provider, dtype: torch.dtype, cache_dtype: torch.dtype, window: int | None
) -> None:
    """Turns red when causal attention gets other sums because some rows are not causal."""
    rows = [(1, 700), (5, 90), (130, 130), (40, 600)]
    batch = random_batch(rows, dtype, cache_dtype)
    own = torch.cat([torch.arange(n - q, n, dtype=torch.int32) for q, n in rows])
    call: Callable[..., torch.Tensor] = provider.load(TEAMS[2])
    causal = call(*arguments(batch), 0.2, window, **scales(batch))
    assert torch.equal(call(*arguments(batch), 0.2, window, **scales(batch), last_key=own), causal)


@BY_PAIRS
@pytest.mark.parametrize("window", [None, 70, 600])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
def test_a_query_has_the_same_bits_whatever_is_computed_beside_it(
    provider: Provider, dtype: torch.dtype, cache_dtype: torch.dtype, window: int | None
) -> None:
    """Its keys, and nothing else, say what it gives, in any chunk that has the rest of its span and
    with any number of threads. Turns red when a sum depends on the tile."""
    length = 1200
    batch = one_prompt(length, dtype, cache_dtype, num_heads=6)
    generator = torch.Generator().manual_seed(1)
    last_key = random_last_key(generator, [(length, length)])
    last_key[500:640] = 639  # a span over the end of a span of keys (512)
    whole = attend(provider, batch, last_key, 0, length, window)
    for low, within in ((0, 0), (63, 65), (100, 106), (505, 520), (0, 999), (1199, 1199)):
        high = int(last_key[within]) + 1
        for threads in (1, 3):
            part = attend(provider, batch, last_key, low, high, window, threads)
            assert torch.equal(part, whole[low:high]), f"queries {low} to {high}, {threads} threads"


@BY_PAIRS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES, ids=str)
def test_a_broken_token_reaches_the_spans_that_see_it_only(
    provider: Provider, dtype: torch.dtype, cache_dtype: torch.dtype, window: int | None, bad: float
) -> None:
    """Turns red when a weight of 0 is all that keeps a V after a query's span from it."""
    length, broken = 560, 300
    batch = one_prompt(length, dtype, cache_dtype, num_heads=4)
    position = torch.arange(length)
    last_key = ((position // 70 + 1) * 70 - 1).clamp(max=length - 1).int()
    clean = attend(provider, batch, last_key, 0, length, window)
    poisoned = batch.v_cache if batch.v_scale is None else batch.v_scale
    poisoned[int(batch.block_table[0, broken // 16]), broken % 16] = bad
    got = attend(provider, batch, last_key, 0, length, window)
    sees = (last_key >= broken) & (position < broken + (window or length))
    assert 0 < int(sees[:broken].sum()) < broken
    assert torch.equal(got[~sees], clean[~sees])
    assert not got[sees].isfinite().any()


def one_prompt(
    length: int, dtype: torch.dtype, cache_dtype: torch.dtype, num_heads: int
) -> PagedBatch:
    return random_batch([(length, length)], dtype, cache_dtype, num_heads)


def random_batch(
    rows: Rows, dtype: torch.dtype, cache_dtype: torch.dtype, num_heads: int = 4
) -> PagedBatch:
    return paged_batch(
        torch.Generator().manual_seed(0),
        rows,
        num_heads=num_heads,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )


def attend(
    provider: Provider,
    batch: PagedBatch,
    last_key: torch.Tensor,
    low: int,
    high: int,
    window: int | None,
    threads: int = 2,
) -> torch.Tensor:
    """Queries low … high - 1 of the only row, over the keys up to there."""
    return provider.load(TEAMS[threads])(
        batch.q[low:high],
        batch.k_cache,
        batch.v_cache,
        batch.block_table,
        torch.tensor([0, high - low], dtype=torch.int32),
        torch.tensor([high], dtype=torch.int32),
        0.1,
        window,
        batch.k_scale,
        batch.v_scale,
        last_key=last_key[low:high],
    )
