"""LFM2 (Liquid AI 2025, arXiv:2511.23404): short convolutions, and attention in some layers.

LFM2-8B-A1B has experts behind its first layers.
"""

from __future__ import annotations

import torch

from quire.attention import StepInputs
from quire.config import ModelSpec
from quire.config.families.lfm2 import LFM2Traits
from quire.layers import LayerFactory
from quire.models.expert_names import with_experts
from quire.models.weight_map import WeightMap

__all__ = ["LFM2Model"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={"embed_tokens": "embed", "embedding_norm": "norm"},
    blocks="layers.{}.",
    block={
        "operator_norm": "operator_norm",
        "self_attn.q_proj": "attention.qkv:q",
        "self_attn.k_proj": "attention.qkv:k",
        "self_attn.v_proj": "attention.qkv:v",
        "self_attn.q_layernorm": "attention.attention.q_norm",
        "self_attn.k_layernorm": "attention.attention.k_norm",
        "self_attn.out_proj": "attention.output",
        "conv.in_proj": "conv.inputs",
        "conv.conv": "conv.conv",
        "conv.out_proj": "conv.output",
        "ffn_norm": "mlp_norm",
        "feed_forward.w1": "mlp.gate_up:gate",
        "feed_forward.w3": "mlp.gate_up:up",
        "feed_forward.w2": "mlp.down",
    },
    embedding="model.embed_tokens.weight",
)


class AttentionOperator:
    """Grouped-query attention with norms on the heads of q and k."""

    def __init__(self, spec: ModelSpec, layer: int, make: LayerFactory) -> None:
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention = make.attention(
            layer, heads, rope=spec.ropes[layer], qk_norm_eps=spec.norm_eps
        )
        self.qkv = make.qkv_linear(spec.hidden_size, self.attention, None, bias=False)
        size = spec.hidden_size
        self.output = make.row(spec.num_heads * spec.head_dim, size, bias=False, unit=spec.head_dim)

    def mix(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Return what each token takes from those before it, [T, H · D]."""
        return self.attention(self.qkv(x), positions, step)


class ConvOperator:
    """A convolution between two gates, from a projection to both gates and to its input."""

    def __init__(self, spec: ModelSpec, traits: LFM2Traits, make: LayerFactory) -> None:
        size, bias = spec.hidden_size, traits.conv_bias
        self.inputs = make.merged_column(
            size, {"b": size, "c": size, "v": size}, bias=bias, fused=True
        )
        self.conv = make.recurrent.short_conv(size, traits.conv_taps, bias=bias)
        self.output = make.row(size, size, bias=bias)

    def mix(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Return what each token takes from those before it, [T, E]."""
        del positions
        return self.conv(self.inputs(x), step)


class LFM2Block:
    """x + operator(norm(x)), then x + mlp(norm(x)), or experts in place of the MLP; the sums are
    done by the norms."""

    def __init__(self, spec: ModelSpec, traits: LFM2Traits, layer: int, make: LayerFactory) -> None:
        size = spec.hidden_size
        self.operator_norm = make.rms_norm(size, spec.norm_eps)
        self.attention = self.conv = None
        if spec.states[layer]:
            self.conv = ConvOperator(spec, traits, make)
        else:
            self.attention = AttentionOperator(spec, layer, make)
        operator = self.conv or self.attention
        assert operator is not None, "a block has one of the two"
        self._operator, self.output = operator, operator.output
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1, layer=layer)
        self.mlp_norm = make.rms_norm(size, spec.norm_eps)
        self.mlp = self.moe = None
        if spec.experts is not None and spec.experts.layers[layer]:
            self.moe = make.mixture_of_experts(size, spec.experts, spec.activation)
        else:
            self.mlp = make.gated_mlp(size, spec.intermediate_size, spec.activation)
        feed_forward = self.moe or self.mlp
        assert feed_forward is not None, "a block has one of the two"
        self._feed_forward = feed_forward

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] and the residual stream [T, E], which the next norm adds. The last block returns
        those of the wanted tokens."""
        x, residual = self.operator_norm.add(x, residual)
        x, residual = self.wanted(self._operator.mix(x, positions, step), residual, step)
        x, residual = self.mlp_norm.add(self.output(x), residual)
        return self._feed_forward(x), residual


class LFM2Model:
    """`CausalLM`."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, LFM2Traits)
        self.weight_map = WEIGHTS
        if spec.experts is not None:
            self.weight_map = with_experts(WEIGHTS, spec.experts.names)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        self.blocks = [LFM2Block(spec, traits, layer, make) for layer in range(spec.num_layers)]
        self.norm = make.rms_norm(spec.hidden_size, spec.norm_eps)

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
