"""`append_tokens` in Triton: one lane per row."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["append_tokens"]

_ROWS_PER_PROGRAM = 128


@triton.jit(do_not_specialize=["num_rows", "spare"])
def _append_tokens_kernel(
    slots_ptr,
    token_ids_ptr,
    num_computed_ptr,
    num_tokens_ptr,
    row_tokens_ptr,
    positions_ptr,
    num_rows,
    spare,
    max_tokens,
    HAS_POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (pieces of the rows,)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    token = tl.load(token_ids_ptr + row, mask=inside, other=0)
    is_row = inside & (slot != spare)
    at = tl.load(num_tokens_ptr + slot, mask=is_row, other=0)
    token = tl.where(token < 0, 0, token).to(tl.int32)
    tl.store(row_tokens_ptr + slot * max_tokens + at, token, mask=is_row)
    tl.store(num_computed_ptr + slot, at, mask=is_row)
    tl.store(num_tokens_ptr + slot, at + 1, mask=is_row)
    if HAS_POSITIONS:
        spared = tl.load(num_tokens_ptr + slot, mask=inside & (slot == spare), other=0)
        tl.store(positions_ptr + row, tl.where(is_row, at + 1, spared), mask=inside)


def append_tokens(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    num_tokens: torch.Tensor,
    row_tokens: torch.Tensor,
    spare: int,
    positions: torch.Tensor | None,
) -> None:
    """Contract in `quire.ops.rows.append_tokens`."""
    num_rows = slots.shape[0]
    _append_tokens_kernel[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM),)](
        slots,
        token_ids,
        num_computed,
        num_tokens,
        row_tokens,
        slots if positions is None else positions,
        num_rows,
        spare,
        row_tokens.shape[1],
        HAS_POSITIONS=positions is not None,
        BLOCK=_ROWS_PER_PROGRAM,
    )
