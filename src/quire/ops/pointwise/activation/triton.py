"""`activation` and `activation_and_mul` in Triton, pointwise over blocks of elements."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.ops.pointwise.activation.contract import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    resolve_gate,
    resolve_name,
)

__all__ = ["activation", "activation_and_mul"]

_BLOCK = 1024


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """x float32, by the formulas of `torch.nn.functional`."""
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "gelu_tanh":
        # (1 + tanh u) / 2 is the logistic function of 2u.
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    if KIND == "relu":
        return tl.where(x < 0.0, 0.0, x)
    if KIND == "relu2":
        return tl.where(x < 0.0, 0.0, x * x)
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _activation_kernel(x_ptr, out_ptr, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, _activated(x, KIND).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_and_mul_kernel(
    x_ptr,
    out_ptr,
    width,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + 2 * row * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + (2 * row + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == "swiglu_clamped":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        out = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    else:
        out = _activated(gate, KIND) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Contract in `quire.ops.pointwise.activation`."""
    name = resolve_name(kind)
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    _activation_kernel[grid](x, out, x.numel(), KIND=name, BLOCK=_BLOCK)
    return out


def activation_and_mul(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Contract in `quire.ops.pointwise.activation`."""
    name = resolve_gate(kind)
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if out.numel() > 0:
        grid = (out.numel() // width, triton.cdiv(width, _BLOCK))
        _activation_and_mul_kernel[grid](
            x, out, width, KIND=name, BLOCK=_BLOCK, ALPHA=SWIGLU_ALPHA, LIMIT=SWIGLU_LIMIT
        )
    return out
