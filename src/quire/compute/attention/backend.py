"""The door to attention: plan once per step on the host, run once per layer."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from quire.compute.attention.kv_pool import LayerCache
from quire.compute.attention.scores import PLAIN_SCORES, ScoreOptions
from quire.compute.attention.step_inputs import GroupInputs, StepInputs

__all__ = ["AttentionBackend"]


class AttentionBackend(Protocol):
    """One way to compute paged attention.

    K and V are read from the cache only, never from fresh tensors: this step's K/V have been
    written before `run`, so a chunked prompt sees exactly what a whole one sees.
    """

    name: str
    is_capturable: bool
    """True if the host reads nothing of the device in a step of one query per row, so that the
    launches of one such step serve the next one."""
    adds_biases: bool
    """True if the backend takes `key_bias` and `value_bias` of `ScoreOptions`."""

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        window: int | None,
    ) -> Any:
        """Host work of one step for one layer group (splits, work items). Shapes: StepInputs."""
        ...

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        scale: float,
        step: StepInputs,
        group: GroupInputs,
        scores: ScoreOptions = PLAIN_SCORES,
    ) -> torch.Tensor:
        """q [T, H, Dk] over one layer's cache → [T, H, Dv] in q's dtype. H is a multiple of K."""
        ...
