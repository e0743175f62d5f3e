"""Gather the inputs of a step."""

from __future__ import annotations

import torch

__all__ = ["step_inputs"]


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
    """Shapes as in the contract (`quire.ops.rows.step_inputs`)."""
    starts, spare = query_start_loc.long(), num_computed.shape[0] - 1
    token = torch.arange(token_ids.shape[0], device=token_ids.device)
    is_padding = token >= starts[-1]
    row = torch.searchsorted(starts[1:], token, right=True).clamp(max=slots.shape[0] - 1)
    slot = torch.where(is_padding, spare, slots[row])
    position = torch.where(is_padding, 0, num_computed[slots[row]] + token - starts[row])
    token_ids.copy_(row_tokens[slot, position])
    positions.copy_(position)
    block = row_blocks[slot, position // block_size].long()
    slot_mapping.copy_(block * block_size + position % block_size)
    lengths = num_computed[slots] + starts[1:] - starts[:-1]
    seq_lens.copy_(lengths)
    last_block = (lengths - 1) // block_size
    used = torch.arange(row_blocks.shape[1], device=row_blocks.device) <= last_block[:, None]
    block_table.copy_(torch.where(used, row_blocks[slots], block_table))
