"""Llama (Touvron et al. 2023, arXiv:2302.13971) and the families that share its shape.

Blocks with RMSNorm, rotary positions, grouped-query attention and a gated MLP. By `ModelSpec`:
Mistral (arXiv:2310.06825) has sliding windows, Ministral 3 queries that grow with positions; Qwen2
(arXiv:2407.10671) a bias on q, k, v; Qwen3 (arXiv:2505.09388) norms on the heads of q and k; Phi-3
(arXiv:2404.14219) fused projections; OLMo 2 (arXiv:2501.00656) norms behind sublayers and on whole
rows of q and k; Granite factors; SmolLM3 layers without positions; GLM-4 pairs of neighbours in
partly rotated heads; Arcee a plain MLP with squared ReLU. Mixtral (arXiv:2401.04088), Qwen's and
OLMo's mixtures and others have experts in place of some MLPs; gpt-oss (arXiv:2508.10925) sinks too.
DeepSeek (arXiv:2405.04434), GLM-4.7-Flash and MiniCPM3 have latent attention.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import torch

from quire.base.errors import EngineError
from quire.compute.attention import PLAIN_SCORES, StepInputs
from quire.compute.layers import Attention, LatentAttention, LayerFactory, RMSNorm, Scale
from quire.compute.models.expert_names import with_experts
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.model_spec import LatentSpec, LlamaTraits

__all__ = ["LlamaModel"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={"embed_tokens": "embed", "norm": "norm"},
    blocks="layers.{}.",
    block={
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "qkv:q",
        "self_attn.k_proj": "qkv:k",
        "self_attn.v_proj": "qkv:v",
        "self_attn.qkv_proj": "qkv",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "self_attn.sinks": "sinks",
        "self_attn.o_proj": "output",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate_up:gate",
        "mlp.up_proj": "mlp.gate_up:up",
        "mlp.gate_up_proj": "mlp.gate_up",
        "mlp.down_proj": "mlp.down",
    },
    embedding="model.embed_tokens.weight",
    beside={"score": "classes.projection"},
    ignored=(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",),
)


_BEFORE = ("input_layernorm", "post_attention_layernorm")
NORMS_AFTER = replace(
    WEIGHTS,
    block={
        **{name: place for name, place in WEIGHTS.block.items() if name not in _BEFORE},
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
)
NORMS_BOTH = replace(
    WEIGHTS,
    block={
        **WEIGHTS.block,
        "post_self_attn_layernorm": "attention_post_norm",
        "post_mlp_layernorm": "mlp_post_norm",
    },
)


_LATENT = {
    "self_attn.q_a_proj": "latent.down:q",
    "self_attn.q_a_layernorm": "latent.query_norm",
    "self_attn.q_b_proj": "latent.query",
    "self_attn.kv_a_proj_with_mqa": "latent.down:kv",
    "self_attn.kv_a_layernorm": "latent.norm",
    "self_attn.kv_b_proj": "latent.up",
    "self_attn.k_b_proj": "latent.up:k",
    "self_attn.v_b_proj": "latent.up:v",
}


def _with_latent(names: WeightMap, latent: LatentSpec) -> WeightMap:
    own = dict(_LATENT)
    if latent.query_rank is None:
        own = {"self_attn.q_proj": own.pop("self_attn.q_a_proj"), **own}
    others = {name: place for name, place in names.block.items() if not place.startswith("qkv")}
    indexed = (*names.ignored, r"self_attn\.indexer\.")
    return replace(names, block={**others, **own}, ignored=indexed)


def _with_plain_mlp(names: WeightMap) -> WeightMap:
    gated = ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj")
    others = {name: place for name, place in names.block.items() if name not in gated}
    return replace(names, block={**others, "mlp.up_proj": "mlp.up"})


class LlamaBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); the sums are done by the norms. What a
    sublayer gives may have a norm or a factor of its own before it is added."""

    def __init__(
        self, spec: ModelSpec, traits: LlamaTraits, layer: int, make: LayerFactory
    ) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        before = None if traits.norms == "after" else make.rms_norm(size, eps)
        self.attention_norm = before or make.residual_add()
        self.sinks = make.sinks(spec.num_heads) if traits.sinks else None
        self.qkv = self.attention = self.latent = None
        if spec.latent is None:
            self.attention = self._heads(spec, traits, layer, make)
            self.qkv = make.qkv_linear(
                size,
                self.attention,
                before,
                bias=traits.qkv_bias,
                fused=traits.fused_qkv,
                pairs_neighbours=traits.pairs_neighbours,
            )
        else:
            self.latent = _latent(spec, spec.latent, traits, layer, make)
        value = spec.head_dim if spec.latent is None else spec.latent.value
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1, layer=layer)
        self.output = make.row(spec.num_heads * value, size, bias=traits.o_bias, unit=value)
        self.mlp_norm = make.residual_add() if before is None else make.rms_norm(size, eps)
        self.mlp, self.moe = None, None
        if spec.experts is not None and spec.experts.layers[layer]:
            self.moe = make.mixture_of_experts(size, spec.experts, spec.activation)
        elif not traits.gated:
            inner = spec.intermediate_size
            self.mlp = make.mlp(size, inner, spec.activation, bias=traits.mlp_bias)
        else:
            self.mlp = make.gated_mlp(
                size,
                spec.intermediate_size,
                spec.activation,
                bias=traits.mlp_bias,
                fused=traits.fused_gate,
            )
        self.attention_post_norm, self.mlp_post_norm = (
            None if traits.norms == "before" else make.rms_norm(size, eps) for _ in range(2)
        )
        self._factor = _factor(make, traits.residual_factor)

    def _heads(
        self, spec: ModelSpec, traits: LlamaTraits, layer: int, make: LayerFactory
    ) -> Attention:
        return make.attention(
            layer,
            (spec.num_heads, spec.num_kv_heads, spec.head_dim),
            scale=traits.attention_scale,
            rope=spec.ropes[layer],
            qk_norm_eps=None if traits.qk_norm is None else spec.norm_eps,
            qk_norm_over_row=traits.qk_norm == "row",
            scores=PLAIN_SCORES if self.sinks is None else self.sinks.scores,
            query_growth=traits.query_growth,
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
        x, residual = self.attention_norm.add(x, residual)
        x, residual = self.wanted(self._attend(x, positions, step), residual, step)
        x = self._given(self.output(x), self.attention_post_norm)
        x, residual = self.mlp_norm.add(x, residual)
        x = self._feed_forward(x)
        return self._given(x, self.mlp_post_norm), residual

    def _attend(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        if self.latent is not None:
            return self.latent(x, positions, step)
        assert self.attention is not None and self.qkv is not None, "a block has one of the two"
        return self.attention(self.qkv(x), positions, step)

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moe is not None:
            return self.moe(x)
        assert self.mlp is not None, "a block has one of the two"
        return self.mlp(x)

    def _given(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """Return the addition of a sublayer to the stream, from its output."""
        x = x if norm is None else norm(x)
        return x if self._factor is None else self._factor(x)


def _latent(
    spec: ModelSpec, latent: LatentSpec, traits: LlamaTraits, layer: int, make: LayerFactory
) -> LatentAttention:
    scale, rope = traits.attention_scale, spec.ropes[layer]
    assert scale is not None and rope is not None, "its families have both"
    return make.latent_attention(
        layer,
        spec.hidden_size,
        (spec.num_heads, latent),
        scale=scale,
        rope=rope,
        bias=traits.qkv_bias,
        pairs_neighbours=traits.pairs_neighbours,
    )


class LlamaModel:
    """`CausalLM` of the families of `LlamaTraits`, and `Classifies` if it has classes."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, LlamaTraits)
        maps = {"before": WEIGHTS, "after": NORMS_AFTER, "both": NORMS_BOTH}
        self.weight_map = maps[traits.norms]
        if not traits.gated:
            self.weight_map = _with_plain_mlp(self.weight_map)
        if spec.latent is not None:
            self.weight_map = _with_latent(self.weight_map, spec.latent)
        if spec.experts is not None:
            self.weight_map = with_experts(self.weight_map, spec.experts.names)
        self.weight_map = replace(self.weight_map, others=spec.mtp_layers)
        size = spec.hidden_size
        self.lm_head, self.classes = None, None
        if spec.draws_tokens:
            self.embed, self.lm_head = make.embedding_and_head(
                spec.vocab_size, size, tied=spec.tie_word_embeddings
            )
        else:
            self.embed = make.token_embedding(spec.vocab_size, size)
        if spec.num_classes and not spec.draws_tokens:
            self.classes = make.class_heads.score(size, spec.num_classes)
        self._answers = None if spec.classes is None else spec.classes.answers
        self._embed_factor = _factor(make, traits.embedding_factor)
        self.blocks = [LlamaBlock(spec, traits, layer, make) for layer in range(spec.num_layers)]
        num_deep = 0 if spec.images is None else spec.images.num_deep
        self._deep = [make.deep_stack(place) for place in range(num_deep)]
        self.norm = make.rms_norm(spec.hidden_size, spec.norm_eps)
        self._logit_factor = _factor(make, traits.logit_factor)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x, residual = self.embed(token_ids), None
        if self._embed_factor is not None:
            x = self._embed_factor(x)
        for block, deep in zip_longest(self.blocks, self._deep):
            x, residual = block(x, residual, positions, step)
            x = x if deep is None else deep(x)
        return self.norm.add(x, residual)[0]

    def mtp_block(self, spec: ModelSpec, make: LayerFactory) -> LlamaBlock:
        """See `HasMTP`."""
        traits = spec.traits
        assert isinstance(traits, LlamaTraits)
        return LlamaBlock(spec, traits, 0, make)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] → float32 [N, V]. EngineError without a head for logits: requests that draw
        tokens are refused before."""
        if self.lm_head is None:
            raise EngineError(f"the model has no logits, but {len(hidden)} rows were to draw")
        logits = self.lm_head(hidden)
        return logits if self._logit_factor is None else self._logit_factor(logits)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] of last tokens → a number for each class, float32 [N, C]."""
        if self.classes is not None:
            return self.classes(hidden)
        if self._answers is None:
            raise EngineError("the model has no classes, but rows were to be sorted into some")
        no, yes = self.logits(hidden)[:, self._answers].unbind(1)
        return (yes - no).unsqueeze(1)


def _factor(make: LayerFactory, factor: float) -> Scale | None:
    return None if factor == 1.0 else make.scale(factor, is_rounded=False)
