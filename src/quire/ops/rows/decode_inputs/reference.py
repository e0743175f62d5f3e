"""Gather the inputs of a decode step."""

from __future__ import annotations

import torch

__all__ = ["decode_inputs"]


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
    """Shapes as in the contract (`quire.ops.rows.decode_inputs`)."""
    at = num_computed[slots]
    last_block = at // block_size
    positions.copy_(at)
    seq_lens.copy_(at + 1)
    token_ids.copy_(row_tokens[slots, at])
    slot_mapping.copy_(row_blocks[slots, last_block].long() * block_size + at % block_size)
    used = torch.arange(row_blocks.shape[1], device=row_blocks.device) <= last_block[:, None]
    block_table.copy_(torch.where(used, row_blocks[slots], block_table))
