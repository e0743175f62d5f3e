"""Gemma 4's text model (Google 2026, model card).

Differs from Gemma 3: heads of full layers are wider, V has a norm without a weight, and may be K
before its norm; the last layers read K and V of layers before them; each layer ends with what it
makes of a vector of each token, which it has besides, and with a factor of its own. Experts stand
beside the MLP, and each of the two has norms of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory, TokenSide
from quire.compute.models import gemma2
from quire.compute.models.expert_names import with_experts
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.gemma4 import Gemma4Traits
from quire.config.model_spec import ExpertsSpec

__all__ = ["Gemma4Model"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={
        "embed_tokens": "embed",
        "embed_tokens_per_layer": "side.table",
        "per_layer_model_projection": "side.projection",
        "per_layer_projection_norm": "side.norm",
        "norm": "norm",
    },
    blocks="layers.{}.",
    block={
        **gemma2.WEIGHTS.block,
        "per_layer_input_gate": "side.gate",
        "per_layer_projection": "side.projection",
        "post_per_layer_input_norm": "side.norm",
        "layer_scalar": "factor",
    },
    embedding="model.embed_tokens.weight",
    ignored=(r"rotary_emb\.", r"embed_scale$"),
)


class ExpertsBeside:
    """norm(y) + norm(experts(norm(x))), where y is what the MLP makes of x, and the router sees
    x by a norm of its own, divided by √E."""

    def __init__(self, spec: ModelSpec, experts: ExpertsSpec, make: LayerFactory) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        self.mlp_norm, self.input_norm, self.output_norm = (
            make.rms_norm(size, eps) for _ in range(3)
        )
        self.router_norm = make.rms_norm(size, eps, part="")
        self._router_scale = make.scale(size**-0.5, is_rounded=False)
        self.moe = make.mixture_of_experts(size, experts, spec.activation)
        self._add = make.residual_add()

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x, y [T, E] → [T, E]."""
        routed = self._router_scale(self.router_norm(x))
        chosen = self.output_norm(self.moe(self.input_norm(x), routed))
        return self._add(chosen, self.mlp_norm(y))


class Gemma4Block:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), then x + norm(side(x)), times a
    factor."""

    def __init__(
        self, spec: ModelSpec, traits: Gemma4Traits, layer: int, make: LayerFactory
    ) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        kv_heads, head_dim = spec.kv_shapes[layer]
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (
            make.rms_norm(size, eps) for _ in range(4)
        )
        self.attention = make.attention(
            layer,
            (spec.num_heads, kv_heads, head_dim),
            scale=1.0,
            rope=spec.ropes[layer],
            qk_norm_eps=eps,
            v_norm=True,
            keys_are_values=traits.keys_are_values[layer],
            kv_layer=traits.kv_sources[layer],
        )
        self.qkv = make.qkv_linear(size, self.attention, self.attention_norm, bias=False)
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(spec.num_heads * head_dim, size, bias=False, unit=head_dim)
        self.mlp = make.gated_mlp(size, traits.inner_sizes[layer], spec.activation)
        self.beside = None
        if spec.experts is not None:
            self.beside = ExpertsBeside(spec, spec.experts, make)
        self.side = None
        self._own = slice(layer * traits.token_size, (layer + 1) * traits.token_size)
        if traits.token_size:
            self.side = make.side_layer(size, traits.token_size, spec.activation, eps)
        self.factor = make.own_factor()
        self._add = make.residual_add()

    def __call__(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> torch.Tensor:
        """x [T, E]; tokens [T, layers · N], what layers have of each token → [T, E]; of the last
        block that of the wanted tokens."""
        attended = self.attention(self.qkv(self.attention_norm(x)), positions, step)
        attended, x = self.wanted.of(step, attended, x)
        normed, x = self.mlp_norm.add(self.attention_post_norm(self.output(attended)), x)
        y = self.mlp(normed)
        if self.beside is not None:
            y = self.beside(x, y)
        x = self._add(self.mlp_post_norm(y), x)
        if self.side is not None and tokens is not None:
            (tokens,) = self.wanted.of(step, tokens)
            x = self._add(self.side(x, tokens[:, self._own]), x)
        return self.factor(x)


def _without_unread(traits: Gemma4Traits) -> WeightMap:
    """Return the map under which K and V of layers that read those of others are no weights."""
    shared = "|".join(
        str(layer) for layer, source in enumerate(traits.kv_sources) if source != layer
    )
    unread = rf"layers\.({shared})\.self_attn\.[kv]_(proj|norm)\." if shared else None
    return WEIGHTS if unread is None else replace(WEIGHTS, ignored=(*WEIGHTS.ignored, unread))


class Gemma4Model:
    """`CausalLM` of Gemma 4."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, Gemma4Traits)
        self.weight_map = _without_unread(traits)
        if spec.experts is not None:
            self.weight_map = with_experts(self.weight_map, spec.experts.names)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        self._embed_scale = make.embedding_scale(spec.hidden_size**0.5)
        self.side: TokenSide | None = None
        if traits.token_size:
            rows = traits.token_vocab
            self.side = make.token_side(
                rows, spec.hidden_size, traits.token_size, spec.num_layers, spec.norm_eps
            )
        self.blocks = [Gemma4Block(spec, traits, layer, make) for layer in range(spec.num_layers)]
        self.norm = make.rms_norm(spec.hidden_size, spec.norm_eps)
        self._cap = None if traits.logit_cap is None else make.soft_cap(traits.logit_cap)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x = self._embed_scale(self.embed(token_ids))
        tokens = None if self.side is None else self.side(token_ids, x)
        for block in self.blocks:
            x = block(x, tokens, positions, step)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] → float32 [N, V]."""
        logits = self.lm_head(hidden)
        return logits if self._cap is None else self._cap(logits)
