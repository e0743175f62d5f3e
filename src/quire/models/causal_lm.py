"""Interface of a model to the rest of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from quire.attention import StepInputs
from quire.config import ModelSpec
from quire.layers import LayerFactory
from quire.models.weight_map import WeightMap

__all__ = ["CausalLM", "Classifies", "ModelFactory"]


class CausalLM(Protocol):
    """A decoder over one flat batch of tokens."""

    @property
    def weight_map(self) -> WeightMap: ...

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions int64 [T] or [3, T] → hidden [N, E], after the final norm, of
        `step.wanted_tokens`; of all tokens if these are None."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden rows [N, E] → float32 [N, V]."""
        ...


@runtime_checkable
class Classifies(Protocol):
    """A model that may sort prompts into classes."""

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden rows [N, E] of the tokens that tell → float32 [N, C]."""
        ...


ModelFactory = Callable[[ModelSpec, LayerFactory], CausalLM]
