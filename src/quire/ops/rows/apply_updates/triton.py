"""`apply_updates` in Triton: a scatter of words."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["apply_updates"]

_UPDATES_PER_PROGRAM = 512


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["indices_ptr", "values_ptr"]
)
def _apply_updates_kernel(state_ptr, indices_ptr, values_ptr, count, BLOCK: tl.constexpr):
    """Grid: (pieces of the updates,)."""
    update = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = update < count
    index = tl.load(indices_ptr + update, mask=inside, other=0)
    value = tl.load(values_ptr + update, mask=inside, other=0)
    tl.store(state_ptr + index, value, mask=inside)


def apply_updates(state: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Contract in `quire.ops.rows.apply_updates`."""
    count = indices.numel()
    if count == 0:
        return
    _apply_updates_kernel[(triton.cdiv(count, _UPDATES_PER_PROGRAM),)](
        state, indices, values, count, BLOCK=_UPDATES_PER_PROGRAM
    )
