"""`decode_inputs` in Triton: one program per row of the step."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["decode_inputs"]

_BLOCKS_AT_ONCE = 256


@triton.jit
def _decode_inputs_kernel(
    slots_ptr,
    num_computed_ptr,
    row_tokens_ptr,
    row_blocks_ptr,
    block_size,
    token_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    block_table_ptr,
    max_tokens,
    max_blocks,
    BLOCKS: tl.constexpr,
):
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    position = tl.load(num_computed_ptr + slot)
    last_block = position // block_size
    blocks_ptr = row_blocks_ptr + slot * max_blocks
    block = tl.load(blocks_ptr + last_block).to(tl.int64)
    tl.store(token_ids_ptr + row, tl.load(row_tokens_ptr + slot * max_tokens + position))
    tl.store(positions_ptr + row, position)
    tl.store(seq_lens_ptr + row, (position + 1).to(tl.int32))
    tl.store(slot_mapping_ptr + row, block * block_size + position % block_size)
    for first in range(0, last_block.to(tl.int32) + 1, BLOCKS):
        index = first + tl.arange(0, BLOCKS)
        used = index <= last_block
        blocks = tl.load(blocks_ptr + index, mask=used, other=0)
        tl.store(block_table_ptr + row * max_blocks + index, blocks, mask=used)


def decode_inputs(
    slots: torch.Tensor,
    num_computed: torch.Tensor,
    row_tokens: torch.Tensor,
    row_blocks: torch.Tensor,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """Contract in `quire.ops.rows.decode_inputs`."""
    _decode_inputs_kernel[(slots.shape[0],)](
        slots,
        num_computed,
        row_tokens,
        row_blocks,
        block_size,
        token_ids,
        positions,
        seq_lens,
        slot_mapping,
        block_table,
        row_tokens.shape[1],
        row_blocks.shape[1],
        BLOCKS=_BLOCKS_AT_ONCE,
    )
