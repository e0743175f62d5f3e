"""Attention by the formula, in torch: always available, on any device."""

from __future__ import annotations

import torch

from quire.compute.attention.kv_pool import LayerCache
from quire.compute.attention.scores import PLAIN_SCORES, ScoreOptions
from quire.compute.attention.step_inputs import GroupInputs, StepInputs
from quire.ops.attention.paged_attention.reference import paged_attention

__all__ = ["ReferenceAttention"]


class ReferenceAttention:
    """`AttentionBackend` over the reference of `ops.attention.paged_attention`. Plans nothing."""

    name = "reference"
    is_capturable = True
    adds_biases = True

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        window: int | None,
    ) -> None:
        """Nothing to prepare."""

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        scale: float,
        step: StepInputs,
        group: GroupInputs,
        scores: ScoreOptions = PLAIN_SCORES,
    ) -> torch.Tensor:
        """q [T, H, Dk] over one layer's cache → [T, H, Dv]."""
        return paged_attention(
            q,
            cache.k,
            cache.v,
            group.block_table,
            step.query_start_loc,
            step.seq_lens,
            scale,
            group.window,
            cache.k_scale,
            cache.v_scale,
            max_query_len=step.max_query_len,
            last_key=group.last_key,
            **scores.given(),
        )
