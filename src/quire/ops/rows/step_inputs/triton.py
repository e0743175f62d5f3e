"""`step_inputs` in Triton: programs for pieces of the tokens, and one per row."""

# Triton types a kernel as the plain function, without its launch options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["step_inputs"]

_TOKENS_PER_PROGRAM = 128
_BLOCKS_AT_ONCE = 256


@triton.jit
def _row_inputs(
    row,
    slots_ptr,
    query_start_loc_ptr,
    num_computed_ptr,
    row_blocks_ptr,
    block_size,
    seq_lens_ptr,
    block_table_ptr,
    max_blocks,
    BLOCKS: tl.constexpr,
):
    """Write the length and block table of one row."""
    slot = tl.load(slots_ptr + row)
    count = tl.load(query_start_loc_ptr + row + 1) - tl.load(query_start_loc_ptr + row)
    length = tl.load(num_computed_ptr + slot) + count
    last_block = (length - 1) // block_size
    tl.store(seq_lens_ptr + row, length.to(tl.int32))
    for first in range(0, last_block.to(tl.int32) + 1, BLOCKS):
        index = first + tl.arange(0, BLOCKS)
        used = index <= last_block
        blocks = tl.load(row_blocks_ptr + slot * max_blocks + index, mask=used, other=0)
        tl.store(block_table_ptr + row.to(tl.int64) * max_blocks + index, blocks, mask=used)


@triton.jit
def _token_inputs(
    piece,
    slots_ptr,
    query_start_loc_ptr,
    num_computed_ptr,
    row_tokens_ptr,
    row_blocks_ptr,
    block_size,
    token_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    num_rows,
    num_tokens,
    spare,
    max_tokens,
    max_blocks,
    ROW_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write one piece of the tokens; each token finds its row by binary search."""
    token = piece * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    is_token = token < tl.load(query_start_loc_ptr + num_rows)
    row = tl.zeros((TOKENS,), tl.int32)
    for bit in tl.static_range(ROW_BITS):
        later = row + (1 << (ROW_BITS - 1 - bit))
        exists = later < num_rows
        start = tl.load(query_start_loc_ptr + later, mask=exists, other=0)
        row = tl.where(exists & (start <= token), later, row)
    slot = tl.where(is_token, tl.load(slots_ptr + row), spare)
    first = tl.load(query_start_loc_ptr + row)
    computed = tl.load(num_computed_ptr + slot)
    position = tl.where(is_token, computed + token - first, 0)
    place = slot * max_tokens + position
    token_id = tl.load(row_tokens_ptr + place, mask=inside, other=0)
    place = slot * max_blocks + position // block_size
    block = tl.load(row_blocks_ptr + place, mask=inside, other=0).to(tl.int64)
    tl.store(token_ids_ptr + token, token_id, mask=inside)
    tl.store(positions_ptr + token, position, mask=inside)
    tl.store(slot_mapping_ptr + token, block * block_size + position % block_size, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "spare"])
def _step_inputs_kernel(
    slots_ptr,
    query_start_loc_ptr,
    num_computed_ptr,
    row_tokens_ptr,
    row_blocks_ptr,
    block_size,
    token_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    slot_mapping_ptr,
    block_table_ptr,
    num_rows,
    num_tokens,
    spare,
    max_tokens,
    max_blocks,
    ROW_BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid: (rows + pieces of the tokens,)."""
    program = tl.program_id(0)
    if program < num_rows:
        _row_inputs(
            program,
            slots_ptr,
            query_start_loc_ptr,
            num_computed_ptr,
            row_blocks_ptr,
            block_size,
            seq_lens_ptr,
            block_table_ptr,
            max_blocks,
            BLOCKS,
        )
    else:
        _token_inputs(
            program - num_rows,
            slots_ptr,
            query_start_loc_ptr,
            num_computed_ptr,
            row_tokens_ptr,
            row_blocks_ptr,
            block_size,
            token_ids_ptr,
            positions_ptr,
            slot_mapping_ptr,
            num_rows,
            num_tokens,
            spare,
            max_tokens,
            max_blocks,
            ROW_BITS,
            TOKENS,
        )


def step_inputs(
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
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
    """Contract in `quire.ops.rows.step_inputs`."""
    num_rows, num_tokens = slots.shape[0], token_ids.shape[0]
    _step_inputs_kernel[(num_rows + triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM),)](
        slots,
        query_start_loc,
        num_computed,
        row_tokens,
        row_blocks,
        block_size,
        token_ids,
        positions,
        seq_lens,
        slot_mapping,
        block_table,
        num_rows,
        num_tokens,
        row_tokens.shape[0] - 1,
        row_tokens.shape[1],
        row_blocks.shape[1],
        ROW_BITS=row_tokens.shape[0].bit_length(),  # for the most rows: compiled once
        TOKENS=_TOKENS_PER_PROGRAM,
        BLOCKS=_BLOCKS_AT_ONCE,
    )
