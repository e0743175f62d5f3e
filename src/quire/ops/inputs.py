"""Building stones of the operations' input generators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["DTYPES", "PagedBatch", "normal", "paged_batch"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(
    generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Standard normal numbers on the generator's device."""
    sample = torch.randn(shape, generator=generator, device=generator.device)
    return sample.to(dtype)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Arguments of `paged_attention`, in its order and with its shapes."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


def paged_batch(
    generator: torch.Generator,
    rows: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> PagedBatch:
    """A batch of (query_len, seq_len) rows over a shuffled pool. Every slot that holds no token of
    a row is NaN, and table entries past a row's last block name a block full of NaN."""
    device = generator.device
    cache_dtype = cache_dtype or dtype
    counts = [-(-seq_len // block_size) for _, seq_len in rows]
    pool_size = sum(counts) + 1
    order = torch.randperm(pool_size, generator=generator, device=device).to(torch.int32)
    table = order[-1].repeat(len(rows), max([1, *counts]) + 1)
    shape = (pool_size, block_size, num_kv_heads, head_dim)
    k_cache = torch.full(shape, float("nan"), dtype=cache_dtype, device=device)
    v_cache = k_cache.clone()
    used = 0
    for row, (count, (_, seq_len)) in enumerate(zip(counts, rows, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        position = torch.arange(seq_len, device=device)
        block, offset = table[row][position // block_size].long(), position % block_size
        for cache in (k_cache, v_cache):
            tokens = normal(generator, seq_len, num_kv_heads, head_dim, dtype=cache_dtype)
            cache[block, offset] = tokens
    starts = torch.tensor([0, *(query_len for query_len, _ in rows)], device=device).cumsum(0)
    num_tokens = int(starts[-1])
    fused = normal(generator, num_tokens, num_heads + 1, head_dim, dtype=dtype)
    return PagedBatch(
        q=fused[:, :num_heads],  # a view with a token stride, as merged projections give
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=table,
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor([n for _, n in rows], dtype=torch.int32, device=device),
    )
