"""`linear_int4` in Triton. Two groups of inputs share their bytes: the low nibbles are one group,
the high ones the other, and each sum of a group is exact. Sums times scales are added in one order
for any number of rows."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.linear.int4.contract import SYMMETRIC_ZERO, check_arguments, pack_scale
from quire.ops.linear.int8.triton_scaled import merge_pieces, quantize_rows, scale_sums
from quire.ops.linear.plain import PackedMatrix
from quire.ops.linear.rotate.reference import rotate
from quire.ops.native.row_blocks import power_of_two

__all__ = ["linear_int4"]

_COLUMNS = 64
_PROGRAMS = 256
"""Number of programs that read a weight. It follows from the matrix alone, since the order of a sum
must not depend on the GPU's size or on the rows."""

_MAX_SPLIT_ROWS = 256
_MIN_PAIRS = 2
"""Smallest number of group pairs in a piece."""


@triton.jit
def _group_sums(x, nibbles, zero, scale):
    """Return exact sums over a group times their scales, float32 [rows, columns]. x: int8 [rows,
    G]. nibbles: uint8 [columns, G]. zero, scale: [columns]."""
    weight = nibbles.to(tl.int8) - zero[:, None]
    sums = tl.dot(x, tl.trans(weight), out_dtype=tl.int32)
    return sums.to(tl.float32) * scale.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_rows", "pieces"])
def _product_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    group_scale_ptr,
    zero_ptr,
    power_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    depth,
    pairs,
    x_stride,
    pieces,
    piece_pairs,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: (tiles of columns, tiles of rows, pieces if SPLIT else 1). out: float32 [pieces, rows,
    outputs] if SPLIT, else the result. group_scale, zero: [outputs, 2 pairs]."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < outputs
    j = tl.arange(0, GROUP)
    x_row = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weight_row = weight_ptr + column.to(tl.int64)[:, None] * (pairs * GROUP)
    groups_at = column.to(tl.int64) * (2 * pairs)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(2)
    stop = first + 1 if SPLIT else pieces
    for piece in range(first, stop):
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for pair in range(piece * piece_pairs, tl.minimum((piece + 1) * piece_pairs, pairs)):
            low = 2 * pair * GROUP + j[None, :]
            has_high = is_row[:, None] & (low + GROUP < depth)
            x_low = tl.load(x_row + low, mask=is_row[:, None], other=0)
            x_high = tl.load(x_row + low + GROUP, mask=has_high, other=0)
            both_at = weight_row + pair * GROUP + j[None, :]
            both = tl.load(both_at, mask=is_column[:, None], other=0)
            at = groups_at + 2 * pair
            scale_low = tl.load(group_scale_ptr + at, mask=is_column, other=0.0)
            scale_high = tl.load(group_scale_ptr + at + 1, mask=is_column, other=0.0)
            zero_low = tl.full((COLUMNS,), ZERO, tl.int8)
            zero_high = zero_low
            if HAS_ZERO:
                zero_low = tl.load(zero_ptr + at, mask=is_column, other=0)
                zero_high = tl.load(zero_ptr + at + 1, mask=is_column, other=0)
            sums += _group_sums(x_low, both & 15, zero_low, scale_low)
            sums += _group_sums(x_high, both >> 4, zero_high, scale_high)
        total += sums
    inside = is_row[:, None] & is_column[None, :]
    at = row.to(tl.int64)[:, None] * outputs + column[None, :]
    if SPLIT:
        at += first.to(tl.int64) * num_rows * outputs
        tl.store(out_ptr + at, total, mask=inside)
    else:
        x_scale = tl.load(x_scale_ptr + row, mask=is_row, other=0.0)[:, None]
        y = scale_sums(
            total, x_scale, power_ptr, bias_ptr, column[None, :], is_column[None, :], HAS_BIAS
        )
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


class _Int4Matrix:
    """A `PackedMatrix`: uint8 [O, pairs, G], whose low nibbles are groups 0, 2, 4, … and whose high
    nibbles are groups 1, 3, 5, …; a missing last group has scale 0. scales: float16 [O, 2 pairs].
    zeros: int8 of that shape, or None."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        rotation: int,
    ) -> None:
        group = check_arguments(weight, scale, zero, bias, None, rotation)
        outputs, groups = scale.shape
        missing = groups % 2
        grouped = torch.nn.functional.pad(weight, (0, missing * group)).view(outputs, -1, 2, group)
        half, self._power = pack_scale(scale)
        self._packed = grouped[:, :, 0] | grouped[:, :, 1] << 4
        self._scale = torch.nn.functional.pad(half, (0, missing))
        self._zero = None
        if zero is not None:
            self._zero = torch.nn.functional.pad(zero, (0, missing)).to(torch.int8)
        self._bias = None if bias is None else bias.float().contiguous()
        self._dtype, self._rotation = dtype, rotation
        self._outputs, self._depth, self._group = outputs, groups * group, group
        self._piece_pairs = _pairs_per_piece(outputs, self._packed.shape[1])

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = (*x.shape[:-1], self._outputs)
        out = torch.empty(shape, dtype=out_dtype or x.dtype, device=x.device)
        rows, result = x.reshape(-1, self._depth), out.view(-1, self._outputs)
        if len(rows):
            self._multiply(rows, result)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        packed = self._packed[ids]
        nibbles = torch.stack((packed & 15, packed >> 4), dim=-2).flatten(-3, -2)
        zero = SYMMETRIC_ZERO if self._zero is None else self._zero[ids].unsqueeze(-1)
        scale = self._scale[ids].float() * self._power[ids].unsqueeze(-1)
        values = (nibbles.to(torch.int8) - zero).float() * scale.unsqueeze(-1)
        rows = values.flatten(-2)[..., : self._depth]
        return rotate(rows, self._rotation).to(self._dtype)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        num_rows, outputs = out.shape
        pairs = self._packed.shape[1]
        pieces = triton.cdiv(pairs, self._piece_pairs)
        split = pieces > 1 and num_rows <= _MAX_SPLIT_ROWS
        quantized, x_scale = quantize_rows(rotate(x, self._rotation))
        target = x.new_empty((pieces, num_rows, outputs), dtype=torch.float32) if split else out
        tile_rows = min(64, max(16, power_of_two(num_rows)))
        across, down = triton.cdiv(outputs, _COLUMNS), triton.cdiv(num_rows, tile_rows)
        _product_kernel[(across, down, pieces if split else 1)](
            quantized,
            x_scale,
            self._packed,
            self._scale,
            self._packed if self._zero is None else self._zero,
            self._power,
            self._power if self._bias is None else self._bias,
            target,
            num_rows,
            outputs,
            self._depth,
            pairs,
            quantized.stride(0),
            pieces,
            self._piece_pairs,
            HAS_ZERO=self._zero is not None,
            HAS_BIAS=self._bias is not None,
            SPLIT=split,
            ZERO=SYMMETRIC_ZERO,
            GROUP=self._group,
            ROWS=tile_rows,
            COLUMNS=_COLUMNS,
            num_warps=4,
            num_stages=3,
        )
        if split:
            merge_pieces(target, x_scale, self._power, self._bias, out)


def _pairs_per_piece(outputs: int, pairs: int) -> int:
    """Return the group pairs of a piece, so that about `_PROGRAMS` programs read the weight."""
    wanted = -(-_PROGRAMS // -(-outputs // _COLUMNS))
    return max(_MIN_PAIRS, -(-pairs // wanted))


def linear_int4(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    rotation: int = 1,
) -> PackedMatrix:
    """Contract in `quire.ops.linear.int4`."""
    return _Int4Matrix(weight, scale, zero, bias, dtype, rotation)
