"""Norms of q and k, rotation and the write to the cache, one after the other."""

from __future__ import annotations

import torch

from quire.ops.kv.rope_and_write_kv.rope import rope
from quire.ops.kv.rope_and_write_kv.write_kv import write_kv
from quire.ops.norm.rms_norm.reference import rms_norm

__all__ = ["rope_and_write_kv"]


def rope_and_write_kv(
    qkv: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Shapes as in the contract (`quire.ops.kv.rope_and_write_kv`)."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q.copy_(rms_norm(q, q_weight, eps))
        k.copy_(rms_norm(k, k_weight, eps))
    if cos is not None and sin is not None:
        rope(q, k, positions, cos, sin)
    write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
