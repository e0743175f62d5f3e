"""Llama (Touvron et al. 2023, arXiv:2302.13971) and the families that share its shape.

Pre-norm blocks with RMSNorm, rotary positions, grouped-query attention and a gated MLP. By
`ModelSpec`: Mistral (arXiv:2310.06825) has sliding windows; Qwen2 (arXiv:2407.10671) a bias on
q, k, v; Qwen3 (arXiv:2505.09388) norms on the heads of q and k.
"""

from __future__ import annotations

import torch

from quire.attention import StepInputs
from quire.config import ModelSpec
from quire.config.model_spec import LlamaTraits
from quire.layers import LayerFactory
from quire.models.weight_map import WeightMap

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
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "self_attn.o_proj": "output",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate_up:gate",
        "mlp.up_proj": "mlp.gate_up:up",
        "mlp.down_proj": "mlp.down",
    },
    embedding="model.embed_tokens.weight",
    ignored=(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",),
)


class LlamaBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); the sums are done by the norms."""

    def __init__(
        self, spec: ModelSpec, traits: LlamaTraits, layer: int, make: LayerFactory
    ) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention_norm = make.rms_norm(size, eps)
        self.attention = make.attention(
            layer, heads, rope=spec.ropes[layer], qk_norm_eps=eps if traits.qk_norm else None
        )
        self.qkv = make.qkv_linear(size, self.attention, self.attention_norm, bias=traits.qkv_bias)
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(spec.num_heads * spec.head_dim, size, bias=traits.o_bias)
        self.mlp_norm = make.rms_norm(size, eps)
        self.mlp = make.gated_mlp(
            size, spec.intermediate_size, spec.activation, bias=traits.mlp_bias
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] and the residual stream [T, E], to be added by whoever comes next; of the last
        block those of the wanted tokens."""
        x, residual = self.attention_norm.add(x, residual)
        x, residual = self.wanted(self.attention(self.qkv(x), positions, step), residual, step)
        x, residual = self.mlp_norm.add(self.output(x), residual)
        return self.mlp(x), residual


class LlamaModel:
    """`CausalLM` of Llama, Mistral, Qwen2 and Qwen3."""

    weight_map = WEIGHTS

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, LlamaTraits)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        self.blocks = [LlamaBlock(spec, traits, layer, make) for layer in range(spec.num_layers)]
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
