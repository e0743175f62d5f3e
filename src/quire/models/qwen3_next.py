"""Qwen3-Next (Qwen 2025) and the text part of Qwen3.5: gated delta rules (arXiv:2412.06464), and
attention with a gate on its output (arXiv:2505.06708) in some layers.

Norms are zero-centred, but for the one behind the rule. Qwen3-Next and some of Qwen3.5 have
experts.
"""

from __future__ import annotations

import torch

from quire.attention import StepInputs
from quire.config import ModelSpec
from quire.config.families.qwen3_next import DeltaTraits
from quire.layers import LayerFactory
from quire.models.expert_names import with_experts
from quire.models.weight_map import WeightMap

__all__ = ["Qwen3NextModel"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={"embed_tokens": "embed", "norm": "norm"},
    blocks="layers.{}.",
    block={
        "input_layernorm": "input_norm",
        "self_attn.q_proj": "attention.qkv:q",
        "self_attn.k_proj": "attention.qkv:k",
        "self_attn.v_proj": "attention.qkv:v",
        "self_attn.q_norm": "attention.attention.q_norm",
        "self_attn.k_norm": "attention.attention.k_norm",
        "self_attn.o_proj": "attention.output",
        "linear_attn.in_proj_qkvz": "delta.mixer.inputs",
        "linear_attn.in_proj_qkv": "delta.mixer.inputs:qkv",
        "linear_attn.in_proj_z": "delta.mixer.inputs:z",
        "linear_attn.in_proj_ba": "delta.mixer.gates",
        "linear_attn.in_proj_b": "delta.mixer.gates:b",
        "linear_attn.in_proj_a": "delta.mixer.gates:a",
        "linear_attn.conv1d": "delta.mixer.conv",
        "linear_attn": "delta.mixer.rule",
        "linear_attn.norm": "delta.mixer.norm",
        "linear_attn.out_proj": "delta.output",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate_up:gate",
        "mlp.up_proj": "mlp.gate_up:up",
        "mlp.down_proj": "mlp.down",
    },
    embedding="model.embed_tokens.weight",
    ignored=(r"^mtp\.", r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$"),
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
        self.mixer = make.gated_delta(size, heads, traits.taps, spec.norm_eps)
        of_key = heads.num_values // heads.num_keys * heads.value_dim
        self.output = make.row(heads.num_keys * of_key, size, bias=False, unit=of_key)

    def mix(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Return what each token takes from those before it, [T, H · Dv]."""
        del positions
        return self.mixer(x, step)


class Qwen3NextBlock:
    """x + operator(norm(x)), then x + mlp(norm(x)), or experts in place of the MLP; the sums are
    done by the norms."""

    def __init__(
        self, spec: ModelSpec, traits: DeltaTraits, layer: int, make: LayerFactory
    ) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        self.input_norm = make.rms_norm(size, eps, offset=1.0)
        self.attention = self.delta = None
        if spec.states and spec.states[layer]:
            self.delta = DeltaOperator(spec, traits, make)
        else:
            self.attention = GatedAttention(spec, layer, make)
        operator = self.delta or self.attention
        assert operator is not None, "a block has one of the two"
        self._operator, self.output = operator, operator.output
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1, layer=layer)
        self.mlp_norm = make.rms_norm(size, eps, offset=1.0)
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
        x, residual = self.input_norm.add(x, residual)
        x, residual = self.wanted(self._operator.mix(x, positions, step), residual, step)
        x, residual = self.mlp_norm.add(self.output(x), residual)
        return self._feed_forward(x), residual


class Qwen3NextModel:
    """`CausalLM`."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, DeltaTraits)
        self.weight_map = WEIGHTS
        if spec.experts is not None:
            self.weight_map = with_experts(WEIGHTS, spec.experts.names)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        layers = range(spec.num_layers)
        self.blocks = [Qwen3NextBlock(spec, traits, layer, make) for layer in layers]
        self.norm = make.rms_norm(spec.hidden_size, spec.norm_eps, offset=1.0)

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
