"""Blocks and forward of models with attention in some layers and states in the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from quire.attention import StepInputs
from quire.config import ModelSpec
from quire.layers import LayerFactory
from quire.layers.adapted import Projection
from quire.models.expert_names import with_experts
from quire.models.weight_map import WeightMap

__all__ = ["HybridModel", "Mixer"]


class Mixer(Protocol):
    """Attention or a recurrent operator, with the projection of its result."""

    @property
    def output(self) -> Projection: ...

    def mix(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """x [T, E], positions [T] → what each token takes from those before it, as `output` reads
        it."""
        ...


class HybridBlock:
    """x + mixer(norm(x)), then x + mlp(norm(x)), or experts in place of the MLP; the sums are done
    by the norms.

    The mixer is `recurrent` in layers with states, and `attention` in the others.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        make: LayerFactory,
        attend: Callable[[int], Mixer],
        recur: Callable[[], Mixer],
        norm_offset: float,
    ) -> None:
        size = spec.hidden_size
        self.mixer_norm = make.rms_norm(size, spec.norm_eps, offset=norm_offset)
        self.attention = self.recurrent = None
        if spec.states and spec.states[layer]:
            self.recurrent = self._mixer = recur()
        else:
            self.attention = self._mixer = attend(layer)
        self.output = self._mixer.output
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1, layer=layer)
        self.mlp_norm = make.rms_norm(size, spec.norm_eps, offset=norm_offset)
        self.mlp = self.moe = None
        if spec.experts is not None and spec.experts.layers[layer]:
            self.moe = self._feed_forward = make.mixture_of_experts(
                size, spec.experts, spec.activation
            )
        else:
            self.mlp = self._feed_forward = make.gated_mlp(
                size, spec.intermediate_size, spec.activation
            )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] and the residual stream [T, E], which the next norm adds. The last block returns
        those of the wanted tokens."""
        x, residual = self.mixer_norm.add(x, residual)
        x, residual = self.wanted(self._mixer.mix(x, positions, step), residual, step)
        x, residual = self.mlp_norm.add(self.output(x), residual)
        return self._feed_forward(x), residual


class HybridModel:
    """`CausalLM` of hybrid blocks.

    attend: makes the attention of a layer. recur: makes the operator of a layer with states.
    norm_offset: difference between the weights of norms and those on disk.
    """

    def __init__(
        self,
        spec: ModelSpec,
        make: LayerFactory,
        weight_map: WeightMap,
        attend: Callable[[int], Mixer],
        recur: Callable[[], Mixer],
        *,
        norm_offset: float = 0.0,
    ) -> None:
        self.weight_map = weight_map
        if spec.experts is not None:
            self.weight_map = with_experts(weight_map, spec.experts.names)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        self.blocks = [
            HybridBlock(spec, layer, make, attend, recur, norm_offset)
            for layer in range(spec.num_layers)
        ]
        self.norm = make.rms_norm(spec.hidden_size, spec.norm_eps, offset=norm_offset)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x, residual = self.embed(token_ids), None
        for block in self.blocks:
            x, residual = block(x, residual, positions, step)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] → float32 [N, V]."""
        return self.lm_head(hidden)
