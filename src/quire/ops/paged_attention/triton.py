"""`paged_attention` in Triton: a kernel for rows with one query, another one for the rest."""

from __future__ import annotations

import torch

from quire.ops.cpu_provider import token_rows
from quire.ops.paged_attention.triton_decode import attend_decodes
from quire.ops.paged_attention.triton_prefill import attend_prompts

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
) -> torch.Tensor:
    """Contract in `quire.ops.paged_attention`.

    max_query_len: what the host knows of the rows, without asking the device; with 1 only the
    kernel for single queries is launched, otherwise both, of which each leaves out the other's
    rows.
    """
    q = token_rows(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.shape[0] == 0:
        return out
    arguments = (
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
        out,
    )
    attend_decodes(*arguments)
    if max_query_len != 1 and q.shape[0] > 1:
        attend_prompts(*arguments)
    return out
