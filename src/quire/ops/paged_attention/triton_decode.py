"""Attention of rows with one query: long rows are cut into pieces, by their own lengths alone, and
a second kernel merges what the pieces found.

The pieces of all rows are work items of about equal size, dealt out to a fixed number of programs,
so that a captured launch fits any lengths. The query heads of one kv head share a tile.
"""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.cpu_provider import page_strides
from quire.ops.paged_attention.triton_launch import Launch
from quire.ops.paged_attention.triton_tiles import (
    LOG2_E,
    add_sink,
    add_tile,
    divide,
    load_tile,
    row_of_item,
    token_offsets,
)
from quire.ops.row_blocks import power_of_two

__all__ = ["attend_decodes"]

_MIN_QUERIES = 16
"""Rows of the smallest tile that tensor cores multiply."""

_PROGRAMS_PER_PROCESSOR = 4

_PIECES_OF_A_ROW = 256
"""Most pieces of one row over all kv heads: enough for a row alone to keep 132 processors busy, and
a bound on the memory for parts, whatever the longest row."""

_MERGED_AT_ONCE = 16


@triton.jit
def _cut(seq_len, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_PIECES: tl.constexpr):
    """Tokens of a piece, index of the first piece that a query at the end sees, number of those.
    Pieces begin at multiples of their size. One of no tokens has one piece."""
    seen = seq_len
    if HAS_WINDOW:
        seen = tl.minimum(seq_len, window)
    size = tl.maximum((seen + SPLIT * MAX_PIECES - 1) // (SPLIT * MAX_PIECES), 1) * SPLIT
    first = (seq_len - seen) // size
    return size, first, tl.maximum((seq_len + size - 1) // size - first, 1)


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slopes_ptr,
    sinks_ptr,
    out_ptr,
    sums_ptr,
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
    soft_cap,
    window,
    room,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (programs, kv heads). room: pieces of a row for which there is memory."""
    kv_head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    starts = tl.load(start_ptr + rows, mask=is_row, other=0)
    num_queries = tl.load(start_ptr + rows + 1, mask=is_row, other=0) - starts
    lens = tl.load(len_ptr + rows, mask=is_row, other=0)
    _, _, counts = _cut(lens, window, HAS_WINDOW, SPLIT, MAX_PIECES)
    counts = tl.where(num_queries == 1, counts, 0)
    num_items = tl.sum(counts)
    ends = tl.cumsum(counts, axis=0)

    member = tl.arange(0, QUERIES)
    head = kv_head * GROUP + member
    dim = tl.arange(0, DIM)
    in_group = (member < GROUP)[:, None] & (dim < head_dim)[None, :]
    key = tl.arange(0, KEYS)
    slope = tl.zeros((QUERIES,), tl.float32)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=member < GROUP, other=0.0) * LOG2_E
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = row_of_item(ends, item)
        token = tl.load(start_ptr + row).to(tl.int64)
        seq_len = tl.load(len_ptr + row)
        size, first, pieces = _cut(seq_len, window, HAS_WINDOW, SPLIT, MAX_PIECES)
        piece = item - tl.sum(tl.where(rows < row, counts, 0))
        low = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
        begin = (first + piece) * size
        end = tl.minimum(begin + size, seq_len)
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
                (seq_len - 1 - position)[None, :],
                slope,
                acc,
                largest,
                total,
                scale,
                soft_cap,
                QUANTIZED,
                True,
                False,
                SOFT_CAP,
                ALIBI,
            )
        if pieces == 1:
            if SINKS:
                sink = tl.load(sinks_ptr + head, mask=member < GROUP, other=0.0) * LOG2_E
                shrink, total = add_sink(sink, largest, total)
                acc *= shrink[:, None]
            out_row = out_ptr + (token * NUM_HEADS + head[:, None]) * head_dim
            out = divide(acc, total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_row + dim[None, :], out, mask=in_group)
        else:
            part = (row.to(tl.int64) * NUM_HEADS + head) * room + piece
            tl.store(sums_ptr + part[:, None] * DIM + dim[None, :], acc, mask=in_group)
            tl.store(stats_ptr + part * 2, largest, mask=member < GROUP)
            tl.store(stats_ptr + part * 2 + 1, total, mask=member < GROUP)


@triton.jit
def _merge_kernel(
    out_ptr,
    sums_ptr,
    stats_ptr,
    sinks_ptr,
    start_ptr,
    len_ptr,
    head_dim,
    window,
    room,
    NUM_HEADS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    PIECES: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid: (rows, heads). PIECES: that are added at once."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(start_ptr + row).to(tl.int64)
    _, _, pieces = _cut(tl.load(len_ptr + row), window, HAS_WINDOW, SPLIT, MAX_PIECES)
    is_cut = (tl.load(start_ptr + row + 1) - token == 1) & (pieces > 1)
    if is_cut:
        dim = tl.arange(0, DIM)
        acc = tl.zeros((DIM,), tl.float32)
        largest = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        for begin in range(0, pieces, PIECES):
            piece = begin + tl.arange(0, PIECES)
            exists = piece < pieces
            part = (row * NUM_HEADS + head) * room + piece
            its_largest = tl.load(stats_ptr + part * 2, mask=exists, other=float("-inf"))
            its_total = tl.load(stats_ptr + part * 2 + 1, mask=exists, other=0.0)
            mask = exists[:, None] & (dim < head_dim)[None, :]
            its_acc = tl.load(sums_ptr + part[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
            new_largest = tl.maximum(largest, tl.max(its_largest, axis=0))
            shrink, grow = tl.exp2(largest - new_largest), tl.exp2(its_largest - new_largest)
            acc = acc * shrink + tl.sum(its_acc * grow[:, None], axis=0)
            total = total * shrink + tl.sum(its_total * grow, axis=0)
            largest = new_largest
        if SINKS:
            shrink, total = add_sink(tl.load(sinks_ptr + head) * LOG2_E, largest, total)
            acc *= shrink
        out = divide(acc, total).to(out_ptr.dtype.element_ty)
        at = (token * NUM_HEADS + head) * head_dim + dim
        tl.store(out_ptr + at, out, mask=dim < head_dim)


def attend_decodes(launch: Launch) -> None:
    """Rows with one query, into `launch.out`; the others are left alone.

    The grid is a function of the number of rows and the machine; what is allocated also of the
    width of the tables."""
    given = launch
    _, num_heads, head_dim = given.q.shape
    _, block_size, num_kv_heads, _ = given.k_cache.shape
    num_rows, group = given.seq_lens.shape[0], num_heads // num_kv_heads
    split = _split_tokens(group)
    max_pieces = max(1, _PIECES_OF_A_ROW // num_kv_heads)
    longest = given.block_table.shape[1] * block_size
    if given.window is not None:
        longest = min(longest, given.window)
    # A window may begin within a piece and end within another one.
    room = min(max_pieces, triton.cdiv(longest, split)) + (given.window is not None)
    dim = max(16, power_of_two(head_dim))
    sums, stats = new_parts(given.q.device, num_rows, num_heads, room, dim)
    wide = dim * given.k_cache.element_size() > 256
    _decode_kernel[(_num_programs(given.q.device, num_kv_heads), num_kv_heads)](
        given.q,
        given.k_cache,
        given.v_cache,
        *given.cache_scales(),
        *given.head_tensors(),
        given.out,
        sums,
        stats,
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
        room,
        NUM_HEADS=num_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=given.window is not None,
        QUANTIZED=given.k_scale is not None,
        SOFT_CAP=given.soft_cap is not None,
        ALIBI=given.alibi_slopes is not None,
        SINKS=given.sinks is not None,
        SPLIT=split,
        MAX_PIECES=max_pieces,
        ROWS=power_of_two(num_rows),
        QUERIES=max(_MIN_QUERIES, power_of_two(group)),
        KEYS=32 if wide else 64,
        DIM=dim,
        PADDED=dim != head_dim,
        num_warps=4,
        num_stages=3,
    )
    if room > 1:
        _merge_kernel[(num_rows, num_heads)](
            given.out,
            sums,
            stats,
            given.head_tensors()[1],
            given.query_start_loc,
            given.seq_lens,
            head_dim,
            given.window or 0,
            room,
            NUM_HEADS=num_heads,
            HAS_WINDOW=given.window is not None,
            SINKS=given.sinks is not None,
            SPLIT=split,
            MAX_PIECES=max_pieces,
            PIECES=_MERGED_AT_ONCE,
            DIM=dim,
            num_warps=4,
        )


def new_parts(
    device: torch.device, num_rows: int, num_heads: int, room: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What pieces find, in float32: sums of weighted V [R, H, room, dim]; the largest score and the
    sum of the weights [R, H, room, 2]."""
    parts = (num_rows, num_heads, room)
    sums = torch.empty((*parts, dim), dtype=torch.float32, device=device)
    return sums, torch.empty((*parts, 2), dtype=torch.float32, device=device)


def _split_tokens(group: int) -> int:
    """Fewest tokens of a piece, by the shape of the model alone. A piece writes and reads again 4
    bytes for each dim of its `group` heads, beside 4 bytes of K and V in 16 bits for each of its
    tokens: 1 part in 32 at most up to 8 heads."""
    return 256 if group <= 4 else 512


def _num_programs(device: torch.device, num_kv_heads: int) -> int:
    """Programs for each kv head."""
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return -(-_PROGRAMS_PER_PROCESSOR * processors // num_kv_heads)
