"""Arguments of one call of `paged_attention`, shared by its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.ops.attention.paged_attention.triton_tiles import score_factors

__all__ = ["Launch"]


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments as in the contract of `paged_attention`; out: [T, H, D], contiguous."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    window: int | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    out: torch.Tensor

    def cache_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales of K and V; the caches themselves where they are not read."""
        if self.k_scale is None or self.v_scale is None:
            return self.k_cache, self.v_cache
        return self.k_scale, self.v_scale

    def head_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slopes and sinks; the lengths where they are not read."""
        slopes, sinks = self.alibi_slopes, self.sinks
        nothing = self.seq_lens
        return nothing if slopes is None else slopes, nothing if sinks is None else sinks

    def factors(self) -> tuple[float, float]:
        """Scale and cap of the scores, for powers of two."""
        return score_factors(self.scale, self.soft_cap)
