"""`embedding` in Triton: a piece of a row per program."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.base.errors import EngineError
from quire.ops.native.cpu_provider import row_ids

__all__ = ["embedding"]

_MOST = 2048
"""Elements of a row in one program: 16 for each of its 128 threads."""


@triton.jit(do_not_specialize=["num_rows"])
def _embedding_kernel(ids_ptr, offset, table_ptr, out_ptr, num_rows, width, BLOCK: tl.constexpr):
    """Grid: (ids, pieces of a row)."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + index).to(tl.int64) + offset
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = (row >= 0) & (row < num_rows)
    inside = column < width
    value = tl.load(table_ptr + row * width + column, mask=inside & exists, other=float("nan"))
    tl.store(out_ptr + index * width + column, value, mask=inside)


def embedding(ids: torch.Tensor, weight: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Contract in `quire.ops.linear.embedding`."""
    if weight.dim() != 2 or not weight.is_contiguous():
        raise EngineError(
            f"embedding takes a contiguous table of rows, not {list(weight.shape)} with "
            f"strides {weight.stride()}."
        )
    ids = row_ids(ids)
    num_rows, width = weight.shape
    out = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    if out.numel():
        block = min(triton.next_power_of_2(width), _MOST)
        grid = (ids.numel(), triton.cdiv(width, block))
        _embedding_kernel[grid](ids, offset, weight, out, num_rows, width, BLOCK=block)
    return out
