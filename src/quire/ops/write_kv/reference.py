"""Store K and V of this step's tokens into the paged cache."""

from __future__ import annotations

import torch

__all__ = ["write_kv"]


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Shapes as in the contract (`quire.ops.write_kv`)."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, offset] = k[kept].to(k_cache.dtype)
    v_cache[block, offset] = v[kept].to(v_cache.dtype)
