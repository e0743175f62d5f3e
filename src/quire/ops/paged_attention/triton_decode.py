"""Attention of rows with one query: long rows are cut at fixed numbers of tokens, whatever the
batch, and a second kernel merges what the pieces found.

The pieces of all rows are work items of about equal size, dealt out to a fixed number of programs,
so that a captured launch fits any lengths. The query heads of one kv head share a tile.
"""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.cpu_provider import page_strides
from quire.ops.paged_attention.triton_tiles import (
    LOG2_E,
    add_tile,
    load_tile,
    row_of_item,
    token_offsets,
)
from quire.ops.row_blocks import power_of_two

__all__ = ["attend_decodes"]

_MIN_QUERIES = 16
"""Rows of the smallest tile that tensor cores multiply."""

_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _num_pieces(seq_len, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """Pieces of rows that a query at the end sees; cut at multiples of SPLIT."""
    pieces = (seq_len + SPLIT - 1) // SPLIT
    if HAS_WINDOW:
        pieces -= tl.maximum(seq_len - window, 0) // SPLIT
    return pieces


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
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
    window,
    max_pieces,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (programs, kv heads)."""
    kv_head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    starts = tl.load(start_ptr + rows, mask=is_row, other=0)
    num_queries = tl.load(start_ptr + rows + 1, mask=is_row, other=0) - starts
    lens = tl.load(len_ptr + rows, mask=is_row, other=0)
    counts = tl.where(num_queries == 1, _num_pieces(lens, window, HAS_WINDOW, SPLIT), 0)
    num_items = tl.sum(counts)

    member = tl.arange(0, QUERIES)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM)
    in_group = (member < GROUP)[:, None] & (dim < head_dim)[None, :]
    key = tl.arange(0, KEYS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = row_of_item(counts, item)
        piece = item - tl.sum(tl.where(rows < row, counts, 0))
        token = tl.load(start_ptr + row).to(tl.int64)
        seq_len = tl.load(len_ptr + row)
        low = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
        begin = (low // SPLIT + piece) * SPLIT
        end = tl.minimum(begin + SPLIT, seq_len)
        q_row = q_ptr + token * q_stride + head[:, None] * head_dim
        q = tl.load(q_row + dim[None, :], mask=in_group, other=0.0)
        acc = tl.zeros((QUERIES, DIM), tl.float32)
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        # Tiles begin at multiples of KEYS, and each has a key that the query sees.
        for at in range(tl.maximum(begin, low // KEYS * KEYS), end, KEYS):
            position = at + key
            exists = (position >= low) & (position < end)
            table = table_ptr + row.to(tl.int64) * table_stride
            offsets = token_offsets(table, position, exists, block_stride, token_stride, BLOCK_SIZE)
            offsets += kv_head * head_dim
            k = load_tile(k_ptr, offsets, exists, dim, head_dim, PADDED)
            v = load_tile(v_ptr, offsets, exists, dim, head_dim, PADDED)
            k_scale, v_scale = key, key
            if QUANTIZED:
                scales = token_offsets(
                    table, position, exists, scale_block_stride, scale_token_stride, BLOCK_SIZE
                )
                k_scale = tl.load(k_scale_ptr + scales + kv_head, mask=exists, other=0.0)
                v_scale = tl.load(v_scale_ptr + scales + kv_head, mask=exists, other=0.0)
            acc, largest, total = add_tile(
                q,
                k,
                v,
                k_scale,
                v_scale,
                exists[None, :],
                acc,
                largest,
                total,
                scale,
                QUANTIZED,
                True,
                False,
            )
        if _num_pieces(seq_len, window, HAS_WINDOW, SPLIT) == 1:
            out_row = out_ptr + (token * NUM_HEADS + head[:, None]) * head_dim
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_row + dim[None, :], out, mask=in_group)
        else:
            part = (row.to(tl.int64) * max_pieces + piece) * NUM_HEADS + head
            tl.store(partial_ptr + part[:, None] * DIM + dim[None, :], acc, mask=in_group)
            tl.store(stats_ptr + part * 2, largest, mask=member < GROUP)
            tl.store(stats_ptr + part * 2 + 1, total, mask=member < GROUP)


@triton.jit
def _merge_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    start_ptr,
    len_ptr,
    head_dim,
    window,
    max_pieces,
    NUM_HEADS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid: (rows, heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(start_ptr + row).to(tl.int64)
    pieces = _num_pieces(tl.load(len_ptr + row), window, HAS_WINDOW, SPLIT)
    is_cut = (tl.load(start_ptr + row + 1) - token == 1) & (pieces > 1)
    dim = tl.arange(0, DIM)
    acc = tl.zeros((DIM,), tl.float32)
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for piece in range(tl.where(is_cut, pieces, 0)):
        at = (row * max_pieces + piece) * NUM_HEADS + head
        its_largest = tl.load(stats_ptr + at * 2)
        its_acc = tl.load(partial_ptr + at * DIM + dim, mask=dim < head_dim, other=0.0)
        new_largest = tl.maximum(largest, its_largest)
        shrink, grow = tl.exp2(largest - new_largest), tl.exp2(its_largest - new_largest)
        acc = acc * shrink + its_acc * grow
        total = total * shrink + tl.load(stats_ptr + at * 2 + 1) * grow
        largest = new_largest
    out = (acc / total).to(out_ptr.dtype.element_ty)
    at = (token * NUM_HEADS + head) * head_dim + dim
    tl.store(out_ptr + at, out, mask=(dim < head_dim) & is_cut)


def attend_decodes(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Rows with one query, into out [T, H, D]; the others are left alone. q: as the contract of
    `quire.ops.paged_attention` has it."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    num_rows, group = seq_lens.shape[0], num_heads // num_kv_heads
    split = _split_tokens(group)
    pieces = triton.cdiv(block_table.shape[1] * block_size, split)
    if window is not None:
        pieces = min(pieces, triton.cdiv(window, split) + 1)
    dim = max(16, power_of_two(head_dim))
    partial = q.new_empty((num_rows, pieces, num_heads, dim), dtype=torch.float32)
    stats = q.new_empty((num_rows, pieces, num_heads, 2), dtype=torch.float32)
    programs = min(num_rows * pieces, triton.cdiv(_num_programs(q.device), num_kv_heads))
    wide = dim * k_cache.element_size() > 256
    _decode_kernel[(programs, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        k_cache if k_scale is None else k_scale,
        v_cache if v_scale is None else v_scale,
        out,
        partial,
        stats,
        block_table,
        query_start_loc,
        seq_lens,
        num_rows,
        block_table.stride(0),
        q.stride(0),
        *page_strides(k_cache, k_scale),
        head_dim,
        scale * LOG2_E,
        window or 0,
        pieces,
        NUM_HEADS=num_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=window is not None,
        QUANTIZED=k_scale is not None,
        SPLIT=split,
        ROWS=power_of_two(num_rows),
        QUERIES=max(_MIN_QUERIES, power_of_two(group)),
        KEYS=32 if wide else 64,
        DIM=dim,
        PADDED=dim != head_dim,
        num_warps=4,
        num_stages=3,
    )
    if pieces > 1:
        _merge_kernel[(num_rows, num_heads)](
            out,
            partial,
            stats,
            query_start_loc,
            seq_lens,
            head_dim,
            window or 0,
            pieces,
            NUM_HEADS=num_heads,
            HAS_WINDOW=window is not None,
            SPLIT=split,
            DIM=dim,
            num_warps=1,
        )


def _split_tokens(group: int) -> int:
    """Tokens of a piece, by the shape of the model alone. A piece writes and reads again 4 bytes
    for each dim of its `group` heads, beside 4 bytes of K and V in 16 bits for each of its tokens:
    1 part in 32 at most up to 8 heads."""
    return 256 if group <= 4 else 512


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_PER_PROCESSOR
    properties = torch.cuda.get_device_properties(device)
    return _PROGRAMS_PER_PROCESSOR * properties.multi_processor_count
