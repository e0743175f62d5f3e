"""`layer_norm` and `add_layer_norm` in Triton: one program per row, which it reads once."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.native.cpu_provider import paired_rows, strided_rows
from quire.ops.native.row_blocks import row_block, row_warps

__all__ = ["add_layer_norm", "layer_norm"]


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    width,
    inner,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outer_index, inner_index = row // inner, row % inner
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype = out_ptr.dtype.element_ty
    x_row = x_ptr + outer_index * x_outer + inner_index * x_inner
    x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_row = residual_ptr + outer_index * residual_outer + inner_index * residual_inner
        x += tl.load(residual_row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(total_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    # Squares of differences, not a difference of squares: rows may be far from zero.
    centred = tl.where(inside, x - tl.sum(x, axis=0) / width, 0.0)
    out = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, out.to(dtype), mask=inside)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Contract in `quire.ops.norm.layer_norm`."""
    x, (outer, inner), strides = strided_rows(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    _layer_norm_kernel[(outer * inner,)](
        x,
        x,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        out,
        width,
        inner,
        *strides,
        0,
        0,
        eps,
        HAS_RESIDUAL=False,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK=row_block(width),
        num_warps=row_warps(width),
    )
    return out


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract in `quire.ops.norm.layer_norm`."""
    x, residual, (outer, inner), x_strides, residual_strides = paired_rows(x, residual)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    width = x.shape[-1]
    _layer_norm_kernel[(outer * inner,)](
        x,
        residual,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        total,
        width,
        inner,
        *x_strides,
        *residual_strides,
        eps,
        HAS_RESIDUAL=True,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK=row_block(width),
        num_warps=row_warps(width),
    )
    return out, total
