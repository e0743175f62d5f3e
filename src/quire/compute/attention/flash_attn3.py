"""Attention by FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), where it is installed.

Its door is `flash_attn_with_kvcache` of `flash_attn_interface`, which takes paged caches.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

from quire.base.platform import Platform
from quire.compute.attention.kv_pool import LayerCache
from quire.compute.attention.needs import AttentionNeeds
from quire.compute.attention.scores import PLAIN_SCORES, ScoreOptions
from quire.compute.attention.step_inputs import GroupInputs, StepInputs
from quire.ops.native.team import Team
from quire.ops.operation import FOR_GPUS

__all__ = ["FlashAttention3", "FlashAttention3Candidate"]

MODULE = "flash_attn_interface"


class FlashAttention3:
    """`AttentionBackend` over `flash_attn_with_kvcache`, which plans on the device."""

    name = "fa3"
    is_capturable = True
    adds_biases = False

    def __init__(self, flash_attn_with_kvcache: Callable[..., torch.Tensor]) -> None:
        self._attend = flash_attn_with_kvcache

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
        """q [T, H, D] over one layer's cache → [T, H, D]."""
        return self._attend(
            q,
            cache.k,
            cache.v,
            cache_seqlens=step.seq_lens,
            page_table=group.block_table,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_q=step.max_query_len,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if group.window is None else (group.window - 1, 0),
            softcap=scores.soft_cap or 0.0,
        )


class FlashAttention3Candidate:
    """Serves Hopper GPUs. Its sums depend on the batch, which decides where it splits."""

    def refusal(self, platform: Platform, needs: AttentionNeeds) -> str | None:
        if platform.device != "cuda":
            return FOR_GPUS
        if platform.gpu is None or (platform.gpu.capability or (0, 0))[0] != 9:
            return "it is for Hopper GPUs (SM 90)"
        if find_spec(MODULE) is None:
            return f"{MODULE} is not installed"
        if needs.dtype not in (torch.float16, torch.bfloat16):
            return needs.refused_dtype()
        if needs.cache_dtype != needs.dtype:
            return needs.refused_cache()
        if needs.head_dim % 8 or needs.head_dim > 256:
            return needs.refused_heads("at most 256, in steps of 8,")
        if lacking := needs.scores - {"soft_cap"}:
            return needs.refused_scores(lacking)
        return needs.refused_shape()

    def make(self, team: Team) -> FlashAttention3:  # noqa: ARG002  no threads here
        return FlashAttention3(import_module(MODULE).flash_attn_with_kvcache)
