"""`linear_int8` in Triton. Sums are exact in 32 bits, so the way they are cut changes no bit."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.linear.int8.contract import check_arguments
from quire.ops.linear.int8.triton_scaled import merge_pieces, quantize_rows, scale_sums
from quire.ops.linear.plain import PackedMatrix
from quire.ops.linear.plain.tiles import MAX_FEW_ROWS, Tiles, default_tiles
from quire.ops.linear.plain.triton import num_processors
from quire.ops.linear.rotate.reference import rotate

__all__ = ["linear_int8"]

_MANY_ROWS = Tiles(128, 128, 64, 1, 8, 3)


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    depth,
    x_stride,
    piece_depth,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid: (tiles of columns, tiles of rows, pieces). out: int32 [pieces, rows, outputs] if SPLIT,
    else the result."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    piece = tl.program_id(2)
    is_row, is_column = row < num_rows, column < outputs
    x_row = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weight_row = weight_ptr + column.to(tl.int64)[:, None] * depth
    sums = tl.zeros((ROWS, COLUMNS), tl.int32)
    end = tl.minimum((piece + 1) * piece_depth, depth)
    for start in range(piece * piece_depth, end, DEPTH):
        k = start + tl.arange(0, DEPTH)
        exists = (k < end)[None, :]
        x = tl.load(x_row + k[None, :], mask=is_row[:, None] & exists, other=0)
        weight = tl.load(weight_row + k[None, :], mask=is_column[:, None] & exists, other=0)
        sums = tl.dot(x, tl.trans(weight), sums, out_dtype=tl.int32)
    inside = is_row[:, None] & is_column[None, :]
    at = row.to(tl.int64)[:, None] * outputs + column[None, :]
    if SPLIT:
        at += piece.to(tl.int64) * num_rows * outputs
        tl.store(out_ptr + at, sums, mask=inside)
    else:
        x_scale = tl.load(x_scale_ptr + row, mask=is_row, other=0.0)[:, None]
        y = scale_sums(
            sums, x_scale, scale_ptr, bias_ptr, column[None, :], is_column[None, :], HAS_BIAS
        )
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


class _Int8Matrix:
    """A `PackedMatrix` with its integers unchanged, row by row."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        rotation: int,
    ) -> None:
        check_arguments(weight, scale, bias, None, rotation)
        self._weight, self._scale = weight.contiguous(), scale.contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self._dtype, self._rotation = dtype, rotation
        self._processors = num_processors(weight.device)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        outputs, depth = self._weight.shape
        shape = (*x.shape[:-1], outputs)
        out = torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)
        rows, result = x.reshape(-1, depth), out.view(-1, outputs)
        if len(rows):
            self._multiply(rows, result)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        scale = self._scale[ids].unsqueeze(-1)
        return rotate(self._weight[ids].float() * scale, self._rotation).to(self._dtype)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        num_rows, (outputs, depth) = len(x), self._weight.shape
        tiles = _MANY_ROWS
        if num_rows <= MAX_FEW_ROWS:
            tiles = default_tiles(num_rows, outputs, depth, self._processors)
        piece_depth = triton.cdiv(triton.cdiv(depth, tiles.pieces), tiles.depth) * tiles.depth
        pieces = triton.cdiv(depth, piece_depth)
        quantized, x_scale = quantize_rows(rotate(x, self._rotation))
        partial = x.new_empty((pieces, num_rows, outputs), dtype=torch.int32) if pieces > 1 else out
        across, down = triton.cdiv(outputs, tiles.columns), triton.cdiv(num_rows, tiles.rows)
        _product_kernel[(across, down, pieces)](
            quantized,
            x_scale,
            self._weight,
            self._scale,
            self._scale if self._bias is None else self._bias,
            partial,
            num_rows,
            outputs,
            depth,
            quantized.stride(0),
            piece_depth,
            HAS_BIAS=self._bias is not None,
            SPLIT=pieces > 1,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            DEPTH=tiles.depth,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if pieces > 1:
            merge_pieces(partial, x_scale, self._scale, self._bias, out)


def linear_int8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    rotation: int = 1,
) -> PackedMatrix:
    """Contract in `quire.ops.linear.int8`."""
    return _Int8Matrix(weight, scale, bias, dtype, rotation)
