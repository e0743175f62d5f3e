"""Batches over a paged cache, for the input generators of operations, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.ops.attention.paged_attention.key_bias import KeyBias, angle_table
from quire.ops.kv.pages import empty_cache
from quire.ops.kv.rope_and_write_kv.write_kv import write_kv, write_plane
from quire.ops.random_tensors import normal

__all__ = ["PagedBatch", "paged_batch", "random_key_bias", "random_last_key"]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Arguments of `paged_attention` with its shapes; scales are None unless the cache is int8."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


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
    value_dim: int | None = None,
) -> PagedBatch:
    """A batch of (query_len, seq_len) rows over a shuffled pool. Slots without a token are NaN, and
    table entries past a row's last block name a block full of NaN. value_dim: elements of V, which
    are the first of K; None: K and V lie apart, of `head_dim` elements each."""
    device = generator.device
    cache_dtype = cache_dtype or dtype
    counts = [-(-seq_len // block_size) for _, seq_len in rows]
    pool_size = sum(counts) + 1
    order = torch.randperm(pool_size, generator=generator, device=device).to(torch.int32)
    table = order[-1].repeat(len(rows), max([1, *counts]) + 1)
    shape = (pool_size, block_size, num_kv_heads, head_dim)
    k_cache, k_scale = empty_cache(*shape, cache_dtype, device, value_dim)
    if value_dim is None:
        v_cache, v_scale = empty_cache(*shape, cache_dtype, device)
    else:
        v_cache, v_scale = k_cache[..., :value_dim], None if k_scale is None else k_scale[..., :1]
    used = 0
    for row, (count, (_, seq_len)) in enumerate(zip(counts, rows, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        position = torch.arange(seq_len, device=device)
        block, offset = table[row][position // block_size].long(), position % block_size
        k, v = normal(generator, 2, seq_len, num_kv_heads, head_dim)
        slots = block * block_size + offset
        if value_dim is None:
            write_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale)
        else:
            k[..., value_dim:] *= 4  # no norm bounds this part
            write_plane(k, value_dim, k_cache, slots, k_scale)
    starts = torch.tensor([0, *(query_len for query_len, _ in rows)], device=device).cumsum(0)
    num_tokens = int(starts[-1])
    fused = normal(generator, num_tokens, num_heads + 1, head_dim, dtype=dtype)
    return PagedBatch(
        q=fused[:, :num_heads],  # a view with a token stride, as merged projections produce
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=table,
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor([n for _, n in rows], dtype=torch.int32, device=device),
        k_scale=k_scale,
        v_scale=v_scale,
    )


def random_last_key(generator: torch.Generator, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return `last_key` of a batch of (query_len, seq_len) rows, int32 [T]. The queries of each row
    are cut into spans of random lengths, and each query sees its whole span."""
    device = generator.device
    ends = [torch.zeros(0, dtype=torch.int32, device=device)]
    for query_len, seq_len in rows:
        mean = int(torch.randint(1, 2 + query_len, (), generator=generator, device=device))
        position = torch.arange(seq_len - query_len, seq_len, device=device)
        is_end = torch.rand(query_len, generator=generator, device=device) < 1 / mean
        is_end[-1:] = True
        which = is_end.cumsum(0) - is_end.long()  # number of spans that have ended before
        ends.append(position[is_end][which].to(torch.int32))
    return torch.cat(ends)


def random_key_bias(
    generator: torch.Generator, num_kv_heads: int, head_dim: int, length: int
) -> KeyBias:
    """A bias of every other pair of three quarters of the dims, for `length` positions."""
    half = 3 * head_dim // 8
    pairs = torch.arange(0, half, 2, dtype=torch.int32)
    angles = normal(generator, length, half) * 3
    return KeyBias(
        pairs,
        normal(generator, num_kv_heads, len(pairs), 2),
        angle_table(angles.cos()),
        angle_table(angles.sin()),
    )
