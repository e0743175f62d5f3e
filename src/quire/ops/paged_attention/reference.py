"""Paged attention by the formula, one row at a time, in float32."""

from __future__ import annotations

import torch

__all__ = ["paged_attention"]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.paged_attention`)."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for row, (start, stop, seq_len) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        if stop > start:
            first = seq_len - (stop - start)  # position of the row's first query
            low = 0 if window is None else max(0, first - window + 1)
            keys = _gather(k_cache, k_scale, block_table[row], low, seq_len)
            values = _gather(v_cache, v_scale, block_table[row], low, seq_len)
            out[start:stop] = _attend(q[start:stop], keys, values, scale, first - low, window)
    return out


def _gather(
    cache: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, low: int, high: int
) -> torch.Tensor:
    """Tokens low … high - 1 of one row, float32 [N, K, D]. Nothing else of the pool is read."""
    position = torch.arange(low, high, device=cache.device)
    block_size = cache.shape[1]
    block = table[position // block_size].long()
    offset = position % block_size
    tokens = cache[block, offset].float()
    return tokens if scales is None else tokens * scales[block, offset].unsqueeze(-1)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    first: int,
    window: int | None,
) -> torch.Tensor:
    """softmax(q kᵀ · scale + mask) v; q [Q, H, D], keys and values [N, K, D] → [Q, H, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = keys.shape
    grouped = q.float().reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,nkd->kgqn", grouped, keys) * scale
    query = first + torch.arange(num_queries, device=q.device)[:, None]
    key = torch.arange(num_keys, device=q.device)[None, :]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    out = torch.einsum("kgqn,nkd->qkgd", weights, values)
    return out.reshape(num_queries, num_heads, head_dim).to(q.dtype)
