"""Paged attention by the formula, in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.ops.attention.paged_attention.key_bias import KeyBias

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
    max_query_len: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    key_bias: KeyBias | None = None,
    value_bias: torch.Tensor | None = None,
    last_key: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shapes as in the contract (`quire.ops.attention.paged_attention`).

    Computes one row at a time. With `max_query_len` 1, one token at a time over all keys that its
    table can hold, so that the host reads nothing from the device.
    """
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    if max_query_len == 1:
        spans = _spans_of_tokens(q.shape[0], block_table.shape[1] * k_cache.shape[1])
        rows = _row_of_token(query_start_loc, q.shape[0])
        tables, newest = block_table[rows], seq_lens[rows] - 1
    else:
        spans = _spans_of_rows(query_start_loc.tolist(), seq_lens.tolist(), window)
        tables, newest = block_table, seq_lens - 1
    for row, start, stop, low, high in spans:
        key = torch.arange(low, high, device=q.device)
        query = newest[row] - torch.arange(stop - start - 1, -1, -1, device=q.device)
        distance = query[:, None] - key[None, :]
        last_seen = query if last_key is None else last_key[start:stop]
        visible = key[None, :] <= last_seen[:, None]
        if window is not None:
            visible &= distance < window
        exists = visible.any(0)
        keys = _gather(k_cache, k_scale, tables[row], key, exists, v_cache.shape[-1])
        values = _gather(v_cache, v_scale, tables[row], key, exists, v_cache.shape[-1])
        if key_bias is not None:
            keys = keys + key_bias.at(key.where(exists, 0), q.shape[-1])
        if value_bias is not None:
            values = values + value_bias
        out[start:stop] = _attend(
            q[start:stop],
            keys,
            values,
            visible,
            distance,
            scale,
            soft_cap,
            alibi_slopes,
            sinks,
        )
    return out


Span = tuple[int, int, int, int, int]
"""A row or token; its first query and the end of them in the batch; its first key and the end."""


def _spans_of_tokens(num_tokens: int, longest: int) -> Iterator[Span]:
    return ((token, token, token + 1, 0, longest) for token in range(num_tokens))


def _spans_of_rows(starts: list[int], lens: list[int], window: int | None) -> Iterator[Span]:
    for row, (start, stop, seq_len) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        if stop > start:
            first = seq_len - (stop - start)  # position of the row's first query
            yield row, start, stop, 0 if window is None else max(0, first - window + 1), seq_len


def _row_of_token(query_start_loc: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Row of each token of the flat batch, [T]."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=query_start_loc.device)
    return torch.searchsorted(query_start_loc[1:].contiguous(), token, right=True)


def _gather(
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    table: torch.Tensor,
    position: torch.Tensor,
    exists: torch.Tensor,
    value_dim: int,
) -> torch.Tensor:
    """Return the tokens at `position` [N] of a row, float32 [N, K, width]; zeros where none exists,
    whatever the memory there contains. Where a token of one head has two scales, the second one
    begins at `value_dim`."""
    block_size = cache.shape[1]
    block = table[position // block_size].long().where(exists, 0)
    offset = position % block_size
    tokens = cache[block, offset].float()
    if scales is not None:
        scale = scales[block, offset].unsqueeze(-1)  # [N, number of scales, 1]
        if scales.shape[-1] == cache.shape[2]:
            tokens = tokens * scale
        else:
            latent, rest = tokens.split((value_dim, cache.shape[-1] - value_dim), dim=-1)
            tokens = torch.cat((latent * scale[:, :1], rest * scale[:, 1:]), dim=-1)
    return tokens.masked_fill(~exists[:, None, None], 0.0)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    distance: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the outputs [Q, H, Dk] of q [Q, H, Dk] over keys [N, K, Dk] and values [N, K, Dv];
    zeros for a query that sees nothing. visible [Q, N]. distance [Q, N]: position of the query
    minus that of the key."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = keys.shape
    grouped = q.float().reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,nkd->kgqn", grouped, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.view(num_kv_heads, -1, 1, 1) * distance
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    out = torch.einsum("kgqn,nkd->qkgd", weights, values)
    return out.reshape(num_queries, num_heads, values.shape[-1]).to(q.dtype)
