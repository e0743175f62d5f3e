"""`add` in Triton, pointwise over blocks of elements."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.base.errors import EngineError

__all__ = ["add"]

_BLOCK = 1024


@triton.jit
def _add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, (x + y).to(out_ptr.dtype.element_ty), mask=inside)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Contract in `quire.ops.pointwise.add`."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise EngineError(
            f"add takes two tensors of one shape and dtype, not {x.dtype}{list(x.shape)} and "
            f"{y.dtype}{list(y.shape)}."
        )
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    _add_kernel[grid](x, y, out, x.numel(), BLOCK=_BLOCK)
    return out
