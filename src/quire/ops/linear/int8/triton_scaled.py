"""Shared parts of integer products in Triton: rows of activations in 8 bits, and the steps after
the sums."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.linear.int8.activations import LARGEST, SMALLEST
from quire.ops.native.row_blocks import power_of_two

__all__ = ["merge_pieces", "quantize_rows", "scale_sums"]

_BLOCK = 8192
"""Inputs of a row that registers hold at a time."""

_ALIGNED = 16
"""Alignment of rows in bytes, for the widest memory accesses."""

_MERGED_COLUMNS = 1024
_LARGEST, _SMALLEST = tl.constexpr(float(LARGEST)), tl.constexpr(SMALLEST)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""Adding and subtracting it rounds a float32 below 2**22 to the nearest integer, ties to even,
since the sum has no bits for fractions."""


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, depth, x_stride, out_stride, BLOCK: tl.constexpr):
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, depth, BLOCK):
        inside = start + at < depth
        x = tl.load(x_ptr + row * x_stride + start + at, mask=inside, other=0.0).to(tl.float32)
        size = tl.abs(x)
        broken |= tl.where(size < float("inf"), 0, 1)
        largest = tl.where(size > largest, size, largest)
    most = tl.max(largest, axis=0)
    is_broken = tl.max(broken, axis=0) > 0
    usable = (most >= _SMALLEST) & (is_broken == 0)
    full = tl.zeros_like(most) + _LARGEST
    factor = tl.where(usable, tl.div_rn(full, tl.where(usable, most, 1.0)), 0.0)
    scale = tl.where(usable, tl.div_rn(most, full), tl.where(is_broken, float("nan"), 0.0))
    tl.store(scale_ptr + row, scale)
    for start in range(0, depth, BLOCK):
        inside = start + at < depth
        x = tl.load(x_ptr + row * x_stride + start + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(usable, x, 0.0)
        rounded = (x * factor + _ROUNDER) - _ROUNDER
        tl.store(out_ptr + row * out_stride + start + at, rounded.to(tl.int8), mask=inside)


@triton.jit
def scale_sums(sums, x_scale, scale_ptr, bias_ptr, column, is_column, HAS_BIAS: tl.constexpr):
    """Return sums [..., columns] with scales and bias, float32. x_scale: one per row, broadcast."""
    scale = tl.load(scale_ptr + column, mask=is_column, other=0.0)
    y = sums.to(tl.float32) * x_scale * scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=is_column, other=0.0)
    return y


@triton.jit(do_not_specialize=["num_rows", "pieces"])
def _merge_kernel(
    partial_ptr,
    x_scale_ptr,
    scale_ptr,
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
    sums = tl.zeros((COLUMNS,), partial_ptr.dtype.element_ty)
    for piece in range(pieces):
        at = (piece * num_rows + row) * outputs + column
        sums += tl.load(partial_ptr + at, mask=inside, other=0)
    x_scale = tl.load(x_scale_ptr + row)
    y = scale_sums(sums, x_scale, scale_ptr, bias_ptr, column, inside, HAS_BIAS)
    tl.store(out_ptr + row * outputs + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [T, I], T > 0, like `quire.ops.linear.int8.activations.quantize_rows`: return int8
    [T, I], whose rows may have a stride, and float32 [T]."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_rows, depth = x.shape
    stride = triton.cdiv(depth, _ALIGNED) * _ALIGNED
    out = torch.empty((num_rows, stride), dtype=torch.int8, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = min(_BLOCK, power_of_two(depth))
    _quantize_kernel[(num_rows,)](
        x,
        out,
        scale,
        depth,
        x.stride(0),
        stride,
        BLOCK=block,
        num_warps=8 if block > 1024 else 4,
        enable_fp_fusion=False,  # rounds like the reference, since no element must differ
    )
    return out[:, :depth], scale


def merge_pieces(
    partial: torch.Tensor,
    x_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Add the sums of pieces [pieces, T, O], int32 or float32, in their order, scale them, and
    write them to out [T, O]. x_scale [T], scale [O], bias [O] or None: float32."""
    pieces, num_rows, outputs = partial.shape
    _merge_kernel[(triton.cdiv(outputs, _MERGED_COLUMNS), num_rows)](
        partial,
        x_scale,
        scale,
        scale if bias is None else bias,
        out,
        num_rows,
        outputs,
        pieces,
        HAS_BIAS=bias is not None,
        COLUMNS=_MERGED_COLUMNS,
        num_warps=4,
    )
