"""Blocks and forward of models with attention in some layers and states in the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory, Scale
from quire.compute.layers.adapted import Projection
from quire.compute.models.expert_names import with_experts
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec

__all__ = ["PLAIN", "HybridModel", "HybridStyle", "Mixer"]


@dataclass(frozen=True, slots=True)
class HybridStyle:
    """Parts in which the families differ.

    norm_offset: difference between the weights of norms and those on disk. embedding_factor,
    residual_factor, logit_factor: factors on embeddings, on the output of a sublayer, and on
    logits. fused_mlp: gate and up are one tensor on disk.
    """

    norm_offset: float = 0.0
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0
    fused_mlp: bool = False


PLAIN = HybridStyle()


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
    by the norms. A model whose MLPs have no inner size has none.

    The mixer is `recurrent` in layers with states, and `attention` in the others.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        make: LayerFactory,
        attend: Callable[[int], Mixer],
        recur: Callable[[], Mixer],
        style: HybridStyle,
    ) -> None:
        size, offset = spec.hidden_size, style.norm_offset
        self.mixer_norm = make.rms_norm(size, spec.norm_eps, offset=offset)
        self.attention = self.recurrent = None
        if spec.states and spec.states[layer]:
            self.recurrent = self._mixer = recur()
        else:
            self.attention = self._mixer = attend(layer)
        self.output = self._mixer.output
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1, layer=layer)
        self._factor = _factor(make, style.residual_factor)
        self.mlp_norm = self.mlp = self.moe = self._feed_forward = None
        if not spec.intermediate_size:
            return
        self.mlp_norm = make.rms_norm(size, spec.norm_eps, offset=offset)
        if spec.experts is not None and spec.experts.layers[layer]:
            self.moe = self._feed_forward = make.mixture_of_experts(
                size, spec.experts, spec.activation
            )
        else:
            self.mlp = self._feed_forward = make.gated_mlp(
                size, spec.intermediate_size, spec.activation, fused=style.fused_mlp
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
        x = self._given(self.output(x))
        if self.mlp_norm is None or self._feed_forward is None:
            return x, residual
        x, residual = self.mlp_norm.add(x, residual)
        return self._given(self._feed_forward(x)), residual

    def _given(self, x: torch.Tensor) -> torch.Tensor:
        """Return the addition of a sublayer to the stream, from its output."""
        return x if self._factor is None else self._factor(x)


class HybridModel:
    """`CausalLM` of hybrid blocks.

    attend: makes the attention of a layer. recur: makes the operator of a layer with states.
    """

    def __init__(
        self,
        spec: ModelSpec,
        make: LayerFactory,
        weight_map: WeightMap,
        attend: Callable[[int], Mixer],
        recur: Callable[[], Mixer],
        *,
        style: HybridStyle = PLAIN,
    ) -> None:
        self.weight_map = replace(weight_map, others=spec.mtp_layers)
        if spec.experts is not None:
            self.weight_map = with_experts(self.weight_map, spec.experts.names)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        self.blocks = [
            HybridBlock(spec, layer, make, attend, recur, style) for layer in range(spec.num_layers)
        ]
        self.norm = make.rms_norm(spec.hidden_size, spec.norm_eps, offset=style.norm_offset)
        self._embed_factor = _factor(make, style.embedding_factor)
        self._logit_factor = _factor(make, style.logit_factor)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x, residual = self.embed(token_ids), None
        if self._embed_factor is not None:
            x = self._embed_factor(x)
        for block in self.blocks:
            x, residual = block(x, residual, positions, step)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] → float32 [N, V]."""
        logits = self.lm_head(hidden)
        return logits if self._logit_factor is None else self._logit_factor(logits)


def _factor(make: LayerFactory, factor: float) -> Scale | None:
    return None if factor == 1.0 else make.scale(factor, is_rounded=False)
