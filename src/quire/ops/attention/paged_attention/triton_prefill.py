"""Attention of rows with several queries, in tiles of 128 rows; a row is a query of one head of a
group.

Tiles of keys that all queries of a tile see whole are computed without a mask.
"""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from quire.ops.attention.paged_attention.triton_launch import Launch
from quire.ops.attention.paged_attention.triton_tiles import (
    LOG2_E,
    add_sink,
    add_tile,
    divide,
    load_tile,
    row_lanes,
    row_of_item,
    token_offsets,
)
from quire.ops.native.cpu_provider import page_strides
from quire.ops.native.row_blocks import power_of_two

__all__ = ["PromptTile", "attend_prompts", "prompt_tile"]


@triton.jit
def _attend_range(
    q,
    acc,
    largest,
    total,
    position,
    slope,
    begin,
    end,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    kv_head,
    block_stride,
    token_stride,
    scale_block_stride,
    scale_token_stride,
    head_dim,
    scale,
    soft_cap,
    window,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return acc, largest and total after the keys `begin` to `end` - 1; begin is a multiple of
    KEYS. position, slope: one for each query, [queries]."""
    dim = tl.arange(0, DIM)
    for at in range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        exists = key < end
        offsets = token_offsets(table_ptr, key, exists, block_stride, token_stride, BLOCK_SIZE)
        offsets += kv_head * head_dim
        k = load_tile(k_ptr, offsets, exists, dim, head_dim, PADDED)
        v = load_tile(v_ptr, offsets, exists, dim, head_dim, PADDED)
        k_scale, v_scale = key, key
        if QUANTIZED:
            scales = token_offsets(
                table_ptr, key, exists, scale_block_stride, scale_token_stride, BLOCK_SIZE
            )
            k_scale = tl.load(k_scale_ptr + scales + kv_head, mask=exists, other=0.0)
            v_scale = tl.load(v_scale_ptr + scales + kv_head, mask=exists, other=0.0)
        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        acc, largest, total = add_tile(
            q,
            k,
            v,
            k_scale,
            v_scale,
            visible,
            position[:, None] - key[None, :],
            slope,
            acc,
            largest,
            total,
            scale,
            soft_cap,
            QUANTIZED,
            MASKED,
            MASKED,
            SOFT_CAP,
            ALIBI,
        )
    return acc, largest, total


@triton.jit(do_not_specialize=["num_rows"])
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,
    sinks_ptr,
    out_ptr,
    table_ptr,
    start_ptr,
    len_ptr,
    num_rows,
    table_stride,
    q_stride,
    block_stride,
    token_stride,
    scale_block_stride,
    scale_token_stride,
    head_dim,
    scale,
    soft_cap,
    window,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (tiles, kv heads). HEADS: GROUP as a power of two; QUERIES: rows of a tile."""
    TOKENS: tl.constexpr = QUERIES // HEADS
    kv_head = tl.program_id(1)
    item = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a prompt take longest
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    starts = tl.load(start_ptr + rows, mask=is_row, other=0)
    lengths = tl.load(start_ptr + rows + 1, mask=is_row, other=0) - starts
    counts = tl.where(is_row & (lengths > 1), (lengths + TOKENS - 1) // TOKENS, 0)
    if item >= tl.sum(counts):
        return
    row = row_of_item(tl.cumsum(counts, axis=0), item)
    first = (item - tl.sum(tl.where(rows < row, counts, 0))) * TOKENS
    start = tl.load(start_ptr + row)
    num_queries = tl.load(start_ptr + row + 1) - start
    seq_len = tl.load(len_ptr + row)
    before = seq_len - num_queries

    member = tl.arange(0, QUERIES)
    query, head = first + member // HEADS, member % HEADS
    dim = tl.arange(0, DIM)
    is_query = (query < num_queries) & (head < GROUP)
    mask = is_query[:, None] & (dim < head_dim)[None, :]
    token = (start + query).to(tl.int64)
    head = kv_head * GROUP + head
    at = token[:, None] * q_stride + head[:, None] * head_dim + dim[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    acc = tl.zeros((QUERIES, DIM), tl.float32)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    slope = tl.zeros((QUERIES,), tl.float32)
    in_group = member % HEADS < GROUP
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=in_group, other=0.0) * LOG2_E

    first_position = before + first
    last_position = before + tl.minimum(first + TOKENS, num_queries) - 1
    end = last_position + 1
    whole_end = (first_position + 1) // KEYS * KEYS
    begin, whole_begin = 0, 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
        whole_begin = (tl.maximum(last_position - window + 1, 0) + KEYS - 1) // KEYS * KEYS
        whole_begin = tl.minimum(whole_begin, end)
    position = before + query
    table = table_ptr + row.to(tl.int64) * table_stride
    # Three parts: the edge of the window, keys that all queries see, the diagonal.
    for part in tl.static_range(3):
        if part == 0:
            part_begin, part_end = begin, whole_begin
        elif part == 1:
            part_begin, part_end = whole_begin, whole_end
        else:
            part_begin, part_end = tl.maximum(whole_begin, whole_end), end
        if HAS_WINDOW or part > 0:
            acc, largest, total = _attend_range(
                q,
                acc,
                largest,
                total,
                position,
                slope,
                part_begin,
                part_end,
                k_ptr,
                v_ptr,
                k_scale_ptr,
                v_scale_ptr,
                table,
                kv_head,
                block_stride,
                token_stride,
                scale_block_stride,
                scale_token_stride,
                head_dim,
                scale,
                soft_cap,
                window,
                BLOCK_SIZE,
                HAS_WINDOW,
                QUANTIZED,
                SOFT_CAP,
                ALIBI,
                part != 1,
                KEYS,
                DIM,
                PADDED,
            )
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=in_group, other=0.0) * LOG2_E
        shrink, total = add_sink(sink, largest, total)
        acc *= shrink[:, None]
    at = (token[:, None] * NUM_HEADS + head[:, None]) * head_dim + dim[None, :]
    out = divide(acc, total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=mask)


@dataclass(frozen=True, slots=True)
class PromptTile:
    """queries: rows of a tile; a row is a query of one head. keys: keys of a tile. stages: stages
    of Triton's pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


def prompt_tile(dim: int, element_size: int, *, quantized: bool) -> PromptTile:
    """Choose a tile for these dims by registers and shared memory. A program has 99 KiB of the
    latter on SM 86 and SM 89."""
    if dim * element_size <= 256:
        # With 64 keys in 8 bits, the kernel for SM 80 keeps its accumulators in memory.
        return PromptTile(128, 32 if quantized else 64, 8, 3)
    if dim * element_size <= 512 and element_size < 4:
        return PromptTile(64, 32, 8, 2)
    return PromptTile(32, 16, 8, 2)


def attend_prompts(launch: Launch, tile: PromptTile | None = None) -> None:
    """Compute rows with two or more queries into `launch.out`; other rows are skipped."""
    given = launch
    num_tokens, num_heads, head_dim = given.q.shape
    _, block_size, num_kv_heads, _ = given.k_cache.shape
    num_rows, group = given.seq_lens.shape[0], num_heads // num_kv_heads
    dim = max(16, power_of_two(head_dim))
    heads = power_of_two(group)
    element_size = max(given.q.element_size(), given.k_cache.element_size())
    tile = tile or prompt_tile(dim, element_size, quantized=given.k_scale is not None)
    queries = max(tile.queries, heads)
    # Rows with one query have no tile here, so all tiles but a row's last are full.
    tiles = num_tokens // (queries // heads) + min(num_rows, num_tokens // 2)
    _prefill_kernel[(tiles, num_kv_heads)](
        given.q,
        given.k_cache,
        given.v_cache,
        *given.cache_scales(),
        *given.head_tensors(),
        given.out,
        given.block_table,
        given.query_start_loc,
        given.seq_lens,
        num_rows,
        given.block_table.stride(0),
        given.q.stride(0),
        *page_strides(given.k_cache, given.k_scale),
        head_dim,
        *given.factors(),
        given.window or 0,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEADS=heads,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=given.window is not None,
        QUANTIZED=given.k_scale is not None,
        SOFT_CAP=given.soft_cap is not None,
        ALIBI=given.alibi_slopes is not None,
        SINKS=given.sinks is not None,
        ROWS=row_lanes(num_rows),
        QUERIES=queries,
        KEYS=tile.keys,
        DIM=dim,
        PADDED=dim != head_dim,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
