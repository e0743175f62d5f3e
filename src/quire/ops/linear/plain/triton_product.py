"""x Wᵀ + b in Triton. The sum over the inputs is cut into pieces (split-K), so that few rows keep a
whole GPU busy with reading, and a second kernel adds the pieces in their order."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.linear.plain.tiles import Tiles

__all__ = ["multiply"]

_MERGED_COLUMNS = 1024

_AMD_STAGES = 2
"""Most stages; with more, tiles do not fit the 64 KiB of shared memory (LDS) of a CDNA3
processor."""


@triton.jit(do_not_specialize=["num_rows", "pieces"])
def _product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    depth,
    x_stride,
    pieces,
    piece_depth,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid: (tiles of columns, tiles of rows, pieces if SPLIT else 1). out: float32 [pieces, rows,
    outputs] if SPLIT, else the result. EVEN: the depth is a multiple of DEPTH."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < outputs
    x_row = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weight_row = weight_ptr + column.to(tl.int64)[:, None] * depth
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(2)
    stop = first + 1 if SPLIT else pieces
    for piece in range(first, stop):
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        end = tl.minimum((piece + 1) * piece_depth, depth)
        for start in range(piece * piece_depth, end, DEPTH):
            k = start + tl.arange(0, DEPTH)
            x_mask, weight_mask = is_row[:, None], is_column[:, None]
            if not EVEN:
                x_mask, weight_mask = x_mask & (k < end)[None, :], weight_mask & (k < end)[None, :]
            x = tl.load(x_row + k[None, :], mask=x_mask, other=0.0)
            weight = tl.load(weight_row + k[None, :], mask=weight_mask, other=0.0)
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        total += acc
    if HAS_BIAS and not SPLIT:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64) * outputs
    if SPLIT:
        at += first.to(tl.int64) * num_rows * outputs
    out = out_ptr + at[:, None] + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "pieces"])
def _merge_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    pieces,
    HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: (blocks of columns, rows)."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < outputs
    total = tl.zeros((COLUMNS,), tl.float32)
    for piece in range(pieces):
        at = (piece * num_rows + row) * outputs + column
        total += tl.load(partial_ptr + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + row * outputs + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    tiles: Tiles,
) -> torch.Tensor:
    """Return x Wᵀ + b, [T, O] in `out_dtype`; sums are in float32 and rounded once. x: [T, I], rows
    may be apart. weight: [O, I] of the same dtype, contiguous. bias: [O] or None."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_rows, depth = x.shape
    outputs = weight.shape[0]
    out = torch.empty((num_rows, outputs), dtype=out_dtype, device=x.device)
    if num_rows == 0:
        return out
    piece_depth = triton.cdiv(triton.cdiv(depth, tiles.pieces), tiles.depth) * tiles.depth
    pieces = triton.cdiv(depth, piece_depth)
    split = pieces > 1 and num_rows <= tiles.max_split_rows
    target = x.new_empty((pieces, num_rows, outputs), dtype=torch.float32) if split else out
    across, down = triton.cdiv(outputs, tiles.columns), triton.cdiv(num_rows, tiles.rows)
    _product_kernel[(across, down, pieces if split else 1)](
        x,
        weight,
        weight if bias is None else bias,
        target,
        num_rows,
        outputs,
        depth,
        x.stride(0),
        pieces,
        piece_depth,
        HAS_BIAS=bias is not None,
        SPLIT=split,
        EVEN=depth % tiles.depth == 0,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages if torch.version.hip is None else _AMD_STAGES,
    )
    if split:
        _merge_kernel[(triton.cdiv(outputs, _MERGED_COLUMNS), num_rows)](
            target,
            weight if bias is None else bias,
            out,
            num_rows,
            outputs,
            pieces,
            HAS_BIAS=bias is not None,
            COLUMNS=_MERGED_COLUMNS,
            num_warps=4,
        )
    return out
