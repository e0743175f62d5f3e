"""Interface of a model to the rest of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec

__all__ = ["Block", "CausalLM", "Classifies", "HasMTP", "HasWeights", "ModelFactory"]


class HasWeights(Protocol):
    """Layers that a checkpoint fills, in the attributes that the map names."""

    @property
    def weight_map(self) -> WeightMap: ...


class CausalLM(HasWeights, Protocol):
    """A decoder over one flat batch of tokens."""

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


Block = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor, StepInputs],
    tuple[torch.Tensor, torch.Tensor],
]
"""A block of a decoder. It takes x [T, E], the residual stream [T, E], if it has begun, positions
and a step, and returns x and the stream, whose sum leaves the block."""


@runtime_checkable
class HasMTP(CausalLM, Protocol):
    """A model whose checkpoints may have an MTP layer. embed: table of tokens."""

    @property
    def embed(self) -> Callable[[torch.Tensor], torch.Tensor]: ...

    def mtp_block(self, spec: ModelSpec, make: LayerFactory) -> Block:
        """Make the block of the MTP layer. spec: a model of this layer alone."""
        ...


ModelFactory = Callable[[ModelSpec, LayerFactory], CausalLM]
