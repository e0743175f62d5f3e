"""Families whose norms are layer norms, by `CenteredTraits`.

StarCoder 2 (arXiv:2402.19173) has a plain MLP; StableLM 2 (arXiv:2402.17834) partly rotated heads,
and a gate; Nemotron-4 (arXiv:2402.16819) squared ReLU. Falcon (arXiv:2311.16867) has attention and
MLP side by side, Bloom (arXiv:2211.05100) ALiBi, Phi-3.5-MoE (arXiv:2404.14219) experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from quire.compute.attention import PLAIN_SCORES, ScoreOptions, StepInputs
from quire.compute.layers import Attention, LayerFactory, LayerNorm
from quire.compute.layers.adapted import Projection
from quire.compute.models.expert_names import with_experts
from quire.compute.models.mpt import alibi_slopes
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.model_spec import CenteredTraits

__all__ = ["CenteredModel"]

_ATTENTION = {
    "self_attn.q_proj": "qkv:q",
    "self_attn.k_proj": "qkv:k",
    "self_attn.v_proj": "qkv:v",
    "self_attn.o_proj": "output",
}
_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}


def _like_llama(mlp: Mapping[str, str]) -> WeightMap:
    return WeightMap(
        prefix="model.",
        outer={"embed_tokens": "embed", "norm": "norm"},
        blocks="layers.{}.",
        block={**_NORMS, **_ATTENTION, **mlp},
        embedding="model.embed_tokens.weight",
        ignored=(r"rotary_emb\.inv_freq$",),
    )


_FALCON = WeightMap(
    prefix="transformer.",
    outer={"word_embeddings": "embed", "ln_f": "norm"},
    blocks="h.{}.",
    block={
        **_NORMS,
        "self_attention.query_key_value": "qkv",
        "self_attention.dense": "output",
        "mlp.dense_h_to_4h": "mlp.up",
        "mlp.dense_4h_to_h": "mlp.down",
    },
    embedding="transformer.word_embeddings.weight",
    ignored=(r"rotary_emb\.inv_freq$", r"\.attention\.(masked_)?bias$"),
)
_TWO_NORMS = {"ln_attn": "attention_norm", "ln_mlp": "mlp_norm"}
_NAMES: Mapping[str, WeightMap] = MappingProxyType(
    {
        "starcoder2": _like_llama({"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}),
        "stablelm": _like_llama(
            {
                "mlp.gate_proj": "mlp.gate_up:gate",
                "mlp.up_proj": "mlp.gate_up:up",
                "mlp.down_proj": "mlp.down",
            }
        ),
        "nemotron": _like_llama({"mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}),
        "phimoe": _like_llama({}),
        "falcon": _FALCON,
        "falcon_two_norms": replace(
            _FALCON,
            block={**_TWO_NORMS, **{n: p for n, p in _FALCON.block.items() if n not in _NORMS}},
        ),
        "bloom": replace(
            _FALCON, outer={**_FALCON.outer, "word_embeddings_layernorm": "embed_norm"}
        ),
    }
)


class CenteredBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); or both at once."""

    def __init__(
        self,
        spec: ModelSpec,
        traits: CenteredTraits,
        scores: ScoreOptions,
        layer: int,
        make: LayerFactory,
    ) -> None:
        size = spec.hidden_size
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention_norm = _norm(make, spec, traits)
        self.attention = make.attention(layer, heads, rope=spec.ropes[layer], scores=scores)
        self.qkv = _qkv(make, size, self.attention, self.attention_norm, traits)
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(
            spec.num_heads * spec.head_dim, size, bias=traits.o_bias, unit=spec.head_dim
        )
        self.mlp_norm = None if traits.mlp_input == "shared" else _norm(make, spec, traits)
        self.mlp, self.moe = None, None
        if spec.experts is None:
            new_mlp = make.gated_mlp if traits.gated else make.mlp
            self.mlp = new_mlp(size, spec.intermediate_size, spec.activation, bias=traits.mlp_bias)
        else:
            self.moe = make.mixture_of_experts(size, spec.experts, spec.activation)
        self._sum = None if traits.mlp_input == "after" else make.residual_add()

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] and the residual stream [T, E], which the next norm adds. The last block returns
        those of the wanted tokens."""
        x, residual = self.attention_norm.add(x, residual)
        attended = self.attention(self.qkv(x), positions, step)
        if self._sum is None:
            assert self.mlp_norm is not None, "it stands after attention"
            attended, residual = self.wanted(attended, residual, step)
            x, residual = self.mlp_norm.add(self.output(attended), residual)
            return self._feed_forward(x), residual
        attended, x, residual = self.wanted.of(step, attended, x, residual)
        x = x if self.mlp_norm is None else self.mlp_norm(residual)
        return self._sum(self._feed_forward(x), self.output(attended)), residual

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moe is not None:
            return self.moe(x)
        assert self.mlp is not None, "a block has one of the two"
        return self.mlp(x)


class CenteredModel:
    """`CausalLM` of the families of `CenteredTraits`."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, CenteredTraits)
        self.weight_map = _NAMES[traits.names]
        if spec.experts is not None:
            self.weight_map = with_experts(self.weight_map, spec.experts.names)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size,
            spec.hidden_size,
            tied=spec.tie_word_embeddings,
            head_bias=traits.head_bias,
        )
        self.embed_norm = _norm(make, spec, traits) if traits.embedding_norm else None
        scores = _alibi(make, spec, traits) if traits.alibi else PLAIN_SCORES
        self.blocks = [
            CenteredBlock(spec, traits, scores, layer, make) for layer in range(spec.num_layers)
        ]
        self.norm = _norm(make, spec, traits)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x, residual = self.embed(token_ids), None
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        for block in self.blocks:
            x, residual = block(x, residual, positions, step)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] → float32 [N, V]."""
        return self.lm_head(hidden)


def _norm(make: LayerFactory, spec: ModelSpec, traits: CenteredTraits) -> LayerNorm:
    return make.layer_norm(spec.hidden_size, spec.norm_eps, offset=traits.norm_offset)


def _qkv(
    make: LayerFactory, size: int, attention: Attention, norm: LayerNorm, traits: CenteredTraits
) -> Projection:
    if traits.qkv == "head":
        return make.headwise_qkv_linear(size, attention, norm, bias=traits.qkv_bias)
    is_fused = traits.qkv == "fused"
    return make.qkv_linear(size, attention, norm, bias=traits.qkv_bias, fused=is_fused)


def _alibi(make: LayerFactory, spec: ModelSpec, traits: CenteredTraits) -> ScoreOptions:
    slopes = alibi_slopes(spec.num_heads, max_bias=8.0)
    if traits.alibi_scaled:
        rounded = torch.tensor(slopes).bfloat16().tolist()
        slopes = [slope * spec.head_dim**-0.5 for slope in rounded]
    return make.alibi(slopes)
