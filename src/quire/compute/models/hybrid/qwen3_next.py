"""Qwen3-Next (Qwen 2025) and the text part of Qwen3.5: gated delta rules (arXiv:2412.06464), and
attention with a gate on its output (arXiv:2505.06708) in some layers.

Norms are zero-centred, but for the one behind the rule. Qwen3-Next and some of Qwen3.5 have
experts.
"""

from __future__ import annotations

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.hybrid.block import HybridBlock, HybridModel, HybridStyle
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.qwen3_next import DeltaTraits

__all__ = ["Qwen3NextModel"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={"embed_tokens": "embed", "norm": "norm"},
    blocks="layers.{}.",
    block={
        "input_layernorm": "mixer_norm",
        "self_attn.q_proj": "attention.qkv:q",
        "self_attn.k_proj": "attention.qkv:k",
        "self_attn.v_proj": "attention.qkv:v",
        "self_attn.q_norm": "attention.attention.q_norm",
        "self_attn.k_norm": "attention.attention.k_norm",
        "self_attn.o_proj": "attention.output",
        "linear_attn.in_proj_qkvz": "recurrent.delta.inputs",
        "linear_attn.in_proj_qkv": "recurrent.delta.inputs:qkv",
        "linear_attn.in_proj_z": "recurrent.delta.inputs:z",
        "linear_attn.in_proj_ba": "recurrent.delta.gates",
        "linear_attn.in_proj_b": "recurrent.delta.gates:b",
        "linear_attn.in_proj_a": "recurrent.delta.gates:a",
        "linear_attn.conv1d": "recurrent.delta.conv",
        "linear_attn": "recurrent.delta.rule",
        "linear_attn.norm": "recurrent.delta.norm",
        "linear_attn.out_proj": "recurrent.output",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate_up:gate",
        "mlp.up_proj": "mlp.gate_up:up",
        "mlp.down_proj": "mlp.down",
    },
    embedding="model.embed_tokens.weight",
    ignored=(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",),
)


class GatedAttention:
    """Grouped-query attention with norms on the heads of q and k, and a sigmoid gate on the
    output."""

    def __init__(self, spec: ModelSpec, layer: int, make: LayerFactory) -> None:
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention = make.attention(
            layer, heads, rope=spec.ropes[layer], qk_norm_eps=spec.norm_eps, qk_norm_offset=1.0
        )
        self.qkv = make.gated_qkv_linear(spec.hidden_size, self.attention)
        size = spec.hidden_size
        self.output = make.row(spec.num_heads * spec.head_dim, size, bias=False, unit=spec.head_dim)
        self._gate = make.output_gate()
        self._size = self.attention.parts["q"].count

    def mix(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Return what each token takes from those before it, [T, H · D]."""
        gates_and_qkv = self.qkv(x)
        gates, qkv = gates_and_qkv[:, : self._size], gates_and_qkv[:, self._size :]
        return self._gate(gates, self.attention(qkv, positions, step))


class DeltaOperator:
    """A gated delta rule, whose heads are projected back."""

    def __init__(self, spec: ModelSpec, traits: DeltaTraits, make: LayerFactory) -> None:
        size, heads = spec.hidden_size, traits.heads
        self.delta = make.recurrent.gated_delta(size, heads, traits.taps, spec.norm_eps)
        of_key = heads.num_values // heads.num_keys * heads.value_dim
        self.output = make.row(heads.num_keys * of_key, size, bias=False, unit=of_key)

    def mix(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Return what each token takes from those before it, [T, H · Dv]."""
        del positions
        return self.delta(x, step)


_STYLE = HybridStyle(norm_offset=1.0)


class Qwen3NextModel(HybridModel):
    """`CausalLM`, and `HasMTP`."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, DeltaTraits)
        super().__init__(
            spec,
            make,
            WEIGHTS,
            attend=lambda layer: GatedAttention(spec, layer, make),
            recur=lambda: DeltaOperator(spec, traits, make),
            style=_STYLE,
        )

    def mtp_block(self, spec: ModelSpec, make: LayerFactory) -> HybridBlock:
        """See `HasMTP`. The layer attends."""

        def attend(layer: int) -> GatedAttention:
            return GatedAttention(spec, layer, make)

        return HybridBlock(spec, 0, make, attend, lambda: attend(0), _STYLE)
