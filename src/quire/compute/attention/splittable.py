"""An attention backend at which graph capture can stop, so that only the code between two attention
calls is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from quire.compute.attention.backend import AttentionBackend
from quire.compute.attention.kv_pool import LayerCache
from quire.compute.attention.scores import PLAIN_SCORES, ScoreOptions
from quire.compute.attention.step_inputs import GroupInputs, StepInputs

__all__ = ["AttentionCall", "SplittableAttention"]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A layer's attention call, without the rows of the step. group: its layer group."""

    q: torch.Tensor
    cache: LayerCache
    scale: float
    group: int
    scores: ScoreOptions


class SplittableAttention:
    """An `AttentionBackend` in front of another one."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.name = inner.name
        self.is_capturable = inner.is_capturable
        self.adds_biases = inner.adds_biases
        self._inner = inner
        self._answer: Callable[[AttentionCall], torch.Tensor] | None = None

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        window: int | None,
    ) -> Any:
        return self._inner.plan(query_start_loc, seq_lens, block_table, window)

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
        if self._answer is None:
            return self._inner.run(q, cache, scale, step, group, scores)
        index = next(i for i, each in enumerate(step.groups) if each is group)
        return self._answer(AttentionCall(q, cache, scale, index, scores))

    @contextmanager
    def answered_by(self, answer: Callable[[AttentionCall], torch.Tensor]) -> Iterator[None]:
        """Within, `answer` gives the layers' results [T, H, Dv]."""
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    def compute(self, call: AttentionCall, step: StepInputs) -> torch.Tensor:
        """The result of a call with the rows of a step."""
        group = step.groups[call.group]
        return self._inner.run(call.q, call.cache, call.scale, step, group, call.scores)
