"""Cuts rows with one query into pieces, and merges their results."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.ops.attention.paged_attention.triton_launch import Launch
from quire.ops.attention.paged_attention.triton_tiles import LOG2_E, add_sink, divide

__all__ = ["Pieces", "cut", "merge_pieces", "new_parts"]

_PIECES_OF_A_ROW = 256
"""Most pieces of one row over all kv heads. They keep 132 processors busy with a single row, and
bound the memory for partial results."""

_MERGED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Pieces:
    """smallest: tokens of a piece, or a divisor of them. most: pieces of a row without a window.
    room: pieces per row for which memory is allocated."""

    smallest: int
    most: int
    room: int

    @classmethod
    def of(cls, launch: Launch) -> Pieces:
        """Choose pieces by the shape of the model and the width of the tables."""
        num_heads, (_, block_size, num_kv_heads, _) = launch.q.shape[1], launch.k_cache.shape
        smallest = _split_tokens(num_heads // num_kv_heads)
        most = max(1, _PIECES_OF_A_ROW // num_kv_heads)
        longest = launch.block_table.shape[1] * block_size
        if launch.window is not None:
            longest = min(longest, launch.window)
        # A window may begin within a piece and end within another one.
        room = min(most, -(-longest // smallest)) + (launch.window is not None)
        return cls(smallest, most, room)


@triton.jit
def cut(seq_len, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_PIECES: tl.constexpr):
    """Return the tokens per piece, the first piece that a query at the end sees, and the number of
    these pieces. Pieces begin at multiples of their size. A row of no tokens has one piece."""
    seen = seq_len
    if HAS_WINDOW:
        seen = tl.minimum(seq_len, window)
    size = tl.maximum((seen + SPLIT * MAX_PIECES - 1) // (SPLIT * MAX_PIECES), 1) * SPLIT
    first = (seq_len - seen) // size
    return size, first, tl.maximum((seq_len + size - 1) // size - first, 1)


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
    """Grid: (rows, heads). PIECES: added at once."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(start_ptr + row).to(tl.int64)
    _, _, pieces = cut(tl.load(len_ptr + row), window, HAS_WINDOW, SPLIT, MAX_PIECES)
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


def merge_pieces(
    launch: Launch, pieces: Pieces, sums: torch.Tensor, stats: torch.Tensor, dim: int
) -> None:
    """Merge rows of several pieces into `launch.out`. dim: elements of a partial result."""
    _, num_heads, head_dim = launch.q.shape
    _merge_kernel[(launch.seq_lens.shape[0], num_heads)](
        launch.out,
        sums,
        stats,
        launch.head_tensors()[1],
        launch.query_start_loc,
        launch.seq_lens,
        head_dim,
        launch.window or 0,
        pieces.room,
        NUM_HEADS=num_heads,
        HAS_WINDOW=launch.window is not None,
        SINKS=launch.sinks is not None,
        SPLIT=pieces.smallest,
        MAX_PIECES=pieces.most,
        PIECES=_MERGED_AT_ONCE,
        DIM=dim,
        num_warps=4,
    )


def new_parts(
    device: torch.device, num_rows: int, num_heads: int, room: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of pieces, in float32: sums of weighted V [R, H, room, dim], and the
    largest score and the sum of the weights [R, H, room, 2]."""
    parts = (num_rows, num_heads, room)
    sums = torch.empty((*parts, dim), dtype=torch.float32, device=device)
    return sums, torch.empty((*parts, 2), dtype=torch.float32, device=device)


def _split_tokens(group: int) -> int:
    """Return the fewest tokens of a piece, by the shape of the model alone. A piece writes and
    rereads 4 bytes per dim for each of its `group` heads, beside 4 bytes of K and V in 16 bits for
    each of its tokens: at most 1/32 of the traffic with up to 8 heads."""
    return 256 if group <= 4 else 512
