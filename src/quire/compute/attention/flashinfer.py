"""Attention by FlashInfer (Ye et al. 2025, arXiv:2501.01005), where it is installed.

Its wrapper for paged prompts takes rows of any number of queries. It plans on the host out of the
lengths of a step, so that each step waits until they are known there; nothing can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from quire.base.platform import Platform
from quire.compute.attention.kv_pool import LayerCache
from quire.compute.attention.needs import AttentionNeeds
from quire.compute.attention.scores import PLAIN_SCORES, ScoreOptions
from quire.compute.attention.step_inputs import GroupInputs, StepInputs
from quire.ops.native.team import Team
from quire.ops.operation import FOR_GPUS

__all__ = ["FlashInfer", "FlashInferCandidate"]

MODULE = "flashinfer"
WORKSPACE_BYTES = 128 * 2**20
"""Size that FlashInfer's documentation recommends; all wrappers share it, since layers run one
after another."""


@dataclass(frozen=True, slots=True)
class FlashInferStep:
    """State that a group's layers share in one step. wrappers: planned ones, by scale and cap."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    wrappers: dict[tuple[float, float], Any]


class FlashInfer:
    """`AttentionBackend` over `BatchPrefillWithPagedKVCacheWrapper`; new_wrapper: makes one on a
    workspace."""

    name = "flashinfer"
    is_capturable = False
    adds_biases = False

    def __init__(self, new_wrapper: Callable[[torch.Tensor], Any]) -> None:
        self._new_wrapper = new_wrapper
        self._wrappers: dict[tuple[int, float, float], Any] = {}
        self._workspace: torch.Tensor | None = None

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        window: int | None,  # noqa: ARG002  the group's, known in `run`
    ) -> FlashInferStep:
        """The wrappers are planned by the first layer of each kind, which knows the heads."""
        return FlashInferStep(query_start_loc, seq_lens, block_table, {})

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
        planned: FlashInferStep = group.plan
        kind = (scale, scores.soft_cap or 0.0)
        if kind not in planned.wrappers:
            index = next(i for i, each in enumerate(step.groups) if each is group)
            wrapper = self._wrapper(index, *kind, q.device)
            _plan(wrapper, planned, q, cache, *kind, group.window)
            planned.wrappers[kind] = wrapper
        return planned.wrappers[kind].run(q, (cache.k, cache.v))

    def _wrapper(self, group: int, scale: float, cap: float, device: torch.device) -> Any:
        """Wrappers live on: each has buffers of its own for what it planned."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        key = (group, scale, cap)
        if key not in self._wrappers:
            self._wrappers[key] = self._new_wrapper(self._workspace)
        return self._wrappers[key]


def _plan(
    wrapper: Any,
    step: FlashInferStep,
    q: torch.Tensor,
    cache: LayerCache,
    scale: float,
    cap: float,
    window: int | None,
) -> None:
    """Pages of all rows one after another: row r owns indices[starts[r] : starts[r + 1]]."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = cache.k.shape
    counts = (step.seq_lens + block_size - 1) // block_size
    starts = torch.zeros_like(step.query_start_loc)
    starts[1:] = counts.cumsum(0)
    entry = torch.arange(step.block_table.shape[1], device=counts.device)
    wrapper.plan(
        step.query_start_loc,
        starts,
        step.block_table[entry[None, :] < counts[:, None]],
        (step.seq_lens - 1) % block_size + 1,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        causal=True,
        sm_scale=scale,
        window_left=-1 if window is None else window - 1,
        logits_soft_cap=cap,
        q_data_type=q.dtype,
        kv_data_type=cache.k.dtype,
    )


class FlashInferCandidate:
    """It serves what Triton does not, or whoever asks for it: see `is_capturable`."""

    def refusal(self, platform: Platform, needs: AttentionNeeds) -> str | None:
        if platform.device != "cuda":
            return FOR_GPUS
        if platform.gpu is None or (platform.gpu.capability or (0, 0)) < (8, 0):
            return "it is for GPUs from Ampere (SM 80) on"
        if find_spec(MODULE) is None:
            return f"{MODULE} is not installed"
        if needs.dtype not in (torch.float16, torch.bfloat16):
            return needs.refused_dtype()
        if needs.cache_dtype != needs.dtype:
            return needs.refused_cache()
        if needs.head_dim not in (64, 128, 256):
            return needs.refused_heads("64, 128 or 256")
        if lacking := needs.scores - {"soft_cap"}:
            return needs.refused_scores(lacking)
        return needs.refused_shape()

    def make(self, team: Team) -> FlashInfer:  # noqa: ARG002  no threads here
        return FlashInfer(import_module(MODULE).BatchPrefillWithPagedKVCacheWrapper)
