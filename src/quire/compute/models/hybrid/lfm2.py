"""LFM2 (Liquid AI 2025, arXiv:2511.23404): short convolutions, and attention in some layers.

LFM2-8B-A1B has experts behind its first layers.
"""

from __future__ import annotations

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.hybrid.block import HybridModel
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.lfm2 import LFM2Traits

__all__ = ["LFM2Model"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={"embed_tokens": "embed", "embedding_norm": "norm"},
    blocks="layers.{}.",
    block={
        "operator_norm": "mixer_norm",
        "self_attn.q_proj": "attention.qkv:q",
        "self_attn.k_proj": "attention.qkv:k",
        "self_attn.v_proj": "attention.qkv:v",
        "self_attn.q_layernorm": "attention.attention.q_norm",
        "self_attn.k_layernorm": "attention.attention.k_norm",
        "self_attn.out_proj": "attention.output",
        "conv.in_proj": "recurrent.inputs",
        "conv.conv": "recurrent.conv",
        "conv.out_proj": "recurrent.output",
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


class LFM2Model(HybridModel):
    """`CausalLM`."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, LFM2Traits)
        super().__init__(
            spec,
            make,
            WEIGHTS,
            attend=lambda layer: AttentionOperator(spec, layer, make),
            recur=lambda: ConvOperator(spec, traits, make),
        )
