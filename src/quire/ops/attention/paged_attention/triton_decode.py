"""Attention of rows with one query. Long rows are cut into pieces, by their own lengths alone, and
a second kernel merges the pieces' results.

The pieces of all rows are work items of about equal size. A fixed number of programs shares them,
so a captured launch fits any lengths. The query heads of one kv head share a tile.
"""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.ops.attention.paged_attention.triton_launch import Launch
from quire.ops.attention.paged_attention.triton_pieces import Pieces, cut, merge_pieces, new_parts
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

__all__ = ["DecodeTile", "attend_decodes", "decode_tile"]

_MIN_QUERIES = 16
"""Rows of the smallest tile that tensor cores take."""


@triton.jit(do_not_specialize=["num_rows"])
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
    """Grid: (programs, kv heads). room: pieces of a row that memory holds."""
    kv_head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    starts = tl.load(start_ptr + rows, mask=is_row, other=0)
    num_queries = tl.load(start_ptr + rows + 1, mask=is_row, other=0) - starts
    lens = tl.load(len_ptr + rows, mask=is_row, other=0)
    _, _, counts = cut(lens, window, HAS_WINDOW, SPLIT, MAX_PIECES)
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
        size, first, pieces = cut(seq_len, window, HAS_WINDOW, SPLIT, MAX_PIECES)
        piece = item - tl.sum(tl.where(rows < row, counts, 0))
        low = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
        begin = (first + piece) * size
        end = tl.minimum(begin + size, seq_len)
        q_row = q_ptr + token * q_stride + head[:, None] * head_dim
        q = tl.load(q_row + dim[None, :], mask=in_group, other=0.0)
        acc = tl.zeros((QUERIES, DIM), tl.float32)
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        # Tiles begin at multiples of KEYS, and the query sees at least one key of each.
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


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """keys: keys of a tile. stages: stages of Triton's pipeline. A table entry is loaded two stages
    before the page it points to, and the page two before its use: 3 keep one tile in flight, 5 two.
    programs: programs per multiprocessor."""

    keys: int
    warps: int
    stages: int
    programs: int


def decode_tile(dim: int, element_size: int) -> DecodeTile:
    """Choose a tile by the bytes of a head in the cache; the registers of two programs fill a
    multiprocessor of SM 90.

    Registers and shared memory of a program there, as compiled for head_dim 128 in 16 bits: 228 per
    thread and 70 KiB. A multiprocessor of AMD's has 64 KiB in all.
    """
    keys = 64
    if dim * element_size > 512:
        keys = 16
    elif dim * element_size > 256 or dim > 128:
        keys = 32
    return DecodeTile(keys, 4, 3 if torch.version.hip else 5, 2)


def attend_decodes(launch: Launch, tile: DecodeTile | None = None) -> None:
    """Compute rows with one query into `launch.out`; other rows are skipped.

    The grid depends on the number of rows and the machine, allocations also on the width of the
    tables.
    """
    given = launch
    _, num_heads, head_dim = given.q.shape
    _, block_size, num_kv_heads, _ = given.k_cache.shape
    num_rows, group = given.seq_lens.shape[0], num_heads // num_kv_heads
    dim = max(16, power_of_two(head_dim))
    pieces = Pieces.of(given)
    sums, stats = new_parts(given.q.device, num_rows, num_heads, pieces.room, dim)
    tile = tile or decode_tile(dim, given.k_cache.element_size())
    programs = -(-tile.programs * _num_processors(given.q.device) // num_kv_heads)
    _decode_kernel[(programs, num_kv_heads)](
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
        pieces.room,
        NUM_HEADS=num_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=given.window is not None,
        QUANTIZED=given.k_scale is not None,
        SOFT_CAP=given.soft_cap is not None,
        ALIBI=given.alibi_slopes is not None,
        SINKS=given.sinks is not None,
        SPLIT=pieces.smallest,
        MAX_PIECES=pieces.most,
        ROWS=row_lanes(num_rows),
        QUERIES=max(_MIN_QUERIES, power_of_two(group)),
        KEYS=tile.keys,
        DIM=dim,
        PADDED=dim != head_dim,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if pieces.room > 1:
        merge_pieces(given, pieces, sums, stats, dim)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
