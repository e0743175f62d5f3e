"""`paged_attention` in Triton: one kernel for rows with one query, another one for other rows."""

from __future__ import annotations

import torch

from quire.ops.attention.paged_attention.triton_decode import attend_decodes
from quire.ops.attention.paged_attention.triton_launch import Launch
from quire.ops.attention.paged_attention.triton_prefill import attend_prompts
from quire.ops.native.cpu_provider import token_rows

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
) -> torch.Tensor:
    """Contract in `quire.ops.attention.paged_attention`.

    With `max_query_len` 1 only the kernels for single queries are launched, otherwise also the one
    for prompts. Each skips the other's rows.
    """
    q = token_rows(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.shape[0] == 0:
        return out
    launch = Launch(
        q,
        k_cache,
        v_cache,
        block_table,
        query_start_loc,
        seq_lens,
        scale,
        window,
        k_scale,
        v_scale,
        soft_cap,
        alibi_slopes,
        sinks,
        out,
    )
    attend_decodes(launch)
    if max_query_len != 1 and q.shape[0] > 1:
        attend_prompts(launch)
    return out
