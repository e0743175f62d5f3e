"""`rms_norm` and `add_rms_norm` in Triton: one program per row, which it reads once."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.native.cpu_provider import paired_rows, strided_rows
from quire.ops.native.row_blocks import row_block, row_warps

__all__ = ["add_rms_norm", "rms_norm"]


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
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
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)).to(dtype)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    out = weight * normed.to(tl.float32)
    tl.store(out_ptr + row * width + column, out.to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Contract in `quire.ops.norm.rms_norm`."""
    x, (outer, inner), strides = strided_rows(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = x.shape[-1]
    _rms_norm_kernel[(outer * inner,)](
        x,
        x,
        weight,
        out,
        out,
        width,
        inner,
        *strides,
        0,
        0,
        eps,
        HAS_RESIDUAL=False,
        BLOCK=row_block(width),
        num_warps=row_warps(width),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract in `quire.ops.norm.rms_norm`."""
    x, residual, (outer, inner), x_strides, residual_strides = paired_rows(x, residual)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    width = x.shape[-1]
    _rms_norm_kernel[(outer * inner,)](
        x,
        residual,
        weight,
        out,
        total,
        width,
        inner,
        *x_strides,
        *residual_strides,
        eps,
        HAS_RESIDUAL=True,
        BLOCK=row_block(width),
        num_warps=row_warps(width),
    )
    return out, total
