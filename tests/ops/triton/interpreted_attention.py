"""Paged attention in Triton's interpreter: results that a batch, a chunk or a broken token must not
change.

Started by tests/ops/test_triton.py, as interpreted_providers.py is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops import test_paged_attention as cpu
from tests.ops.triton.interpreter import repair_interpreter

from quire.ops.attention.paged_attention import triton_decode, triton_pieces
from quire.ops.attention.paged_attention.reference import paged_attention as reference
from quire.ops.attention.paged_attention.triton import paged_attention
from quire.ops.attention.paged_batch import PagedBatch, paged_batch

Parts = tuple[torch.Tensor, torch.Tensor]

repair_interpreter()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, over NaN and inf


def make_batch(
    rows: list[tuple[int, int]], dtype: torch.dtype, cache_dtype: torch.dtype
) -> PagedBatch:
    return paged_batch(
        torch.Generator().manual_seed(0),
        rows,
        num_heads=4,
        num_kv_heads=2,
        head_dim=40,
        block_size=16,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )


def one_row(batch: PagedBatch, row: int, low: int, high: int, window: int | None) -> torch.Tensor:
    """Queries low … high - 1 of a row, as a batch of their own whose context ends with them."""
    start, stop = batch.query_start_loc.tolist()[row : row + 2]
    seq_len = int(batch.seq_lens[row]) - (stop - start - high)
    return paged_attention(
        batch.q[start + low : start + high],
        batch.k_cache,
        batch.v_cache,
        batch.block_table[row : row + 1],
        torch.tensor([0, high - low], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
        0.15,
        window,
        batch.k_scale,
        batch.v_scale,
    )


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    cache_dtype: torch.dtype, window: int | None
) -> None:
    """Decode rows of one piece and of several. Turns red when cuts depend on the batch."""
    batch = make_batch([(1, 600), (3, 70), (1, 40), (1, 513)], torch.float32, cache_dtype)
    whole = paged_attention(*cpu.arguments(batch), 0.15, window, **cpu.scales(batch))
    for row in (0, 2, 3):
        start = int(batch.query_start_loc[row])
        assert torch.equal(one_row(batch, row, 0, 1, window)[0], whole[start])


@pytest.mark.parametrize("window", [None, 70])
def test_a_query_equals_itself_in_any_chunk(window: int | None) -> None:
    """Turns red on a wrong place of a tile in its row. Not to the bit: NumPy's matrix products,
    which the interpreter uses, round rows differently by where they stand."""
    batch = make_batch([(150, 190)], torch.float32, torch.float32)
    whole = paged_attention(*cpu.arguments(batch), 0.15, window, **cpu.scales(batch))
    for low, high in ((0, 2), (23, 90), (90, 150), (149, 150)):
        chunk = one_row(batch, 0, low, high, window)
        torch.testing.assert_close(chunk, whole[low:high], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("window", [None, 900])
def test_long_rows_have_larger_pieces_not_more(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns red when the parts of a long row are written beyond the memory for them, or a piece
    that a window begins within is lost."""
    batch = make_batch([(1, 1500), (1, 700), (1, 513)], torch.float32, torch.float32)
    expected = reference(*cpu.arguments(batch), 0.15, window)
    monkeypatch.setattr(triton_pieces, "_PIECES_OF_A_ROW", 4)  # 2 for each kv head
    rooms: list[int] = []
    monkeypatch.setattr(triton_decode, "new_parts", noting(rooms, triton_decode.new_parts))
    got = paged_attention(*cpu.arguments(batch), 0.15, window, max_query_len=1)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert rooms == [2 if window is None else 3]


def noting(rooms: list[int], make: Callable[..., Parts]) -> Callable[..., Parts]:
    """`make` with every part of its memory NaN, which a merge must not meet."""

    def new_parts(*arguments: Any) -> Parts:
        sums, stats = make(*arguments)
        rooms.append(sums.shape[2])
        return sums.fill_(float("nan")), stats.fill_(float("nan"))

    return new_parts


def test_one_query_per_row_needs_no_kernel_for_prompts() -> None:
    """Turns red when the host's knowledge changes a result."""
    batch = make_batch([(1, 30), (1, 300)], torch.float16, torch.float16)
    both = paged_attention(*cpu.arguments(batch), 0.15)
    assert torch.equal(paged_attention(*cpu.arguments(batch), 0.15, max_query_len=1), both)


def test_rows_without_queries_are_nothing_to_do() -> None:
    """The same test as for the C++ kernels: tests/ops/test_paged_attention.py."""
    cpu.test_rows_without_queries_are_nothing_to_do(paged_attention)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_nan_stays_in_its_own_row(cache_dtype: torch.dtype) -> None:
    """The same test as for the C++ kernels."""
    cpu.test_nan_stays_in_its_own_row(paged_attention, cache_dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
def test_a_broken_token_stays_hidden_from_earlier_queries(
    bad: float, window: int | None, cache_dtype: torch.dtype
) -> None:
    """The same test as for the C++ kernels."""
    cpu.test_a_broken_token_stays_hidden_from_earlier_queries(
        paged_attention, 40, cache_dtype, window, bad
    )
