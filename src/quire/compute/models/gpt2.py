"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Differs from Llama: learned positions, LayerNorm, biases everywhere, a plain MLP with GELU, q, k, v
merged on disk, and weights stored [in, out].
"""

from __future__ import annotations

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.gpt import GPT2Traits

__all__ = ["GPT2Model"]

WEIGHTS = WeightMap(
    prefix="transformer.",
    outer={"wte": "embed", "wpe": "embed_positions", "ln_f": "norm"},
    blocks="h.{}.",
    block={
        "ln_1": "attention_norm",
        "attn.c_attn": "qkv",
        "attn.c_proj": "output",
        "ln_2": "mlp_norm",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    },
    embedding="transformer.wte.weight",
    ignored=(r"\.attn\.(masked_)?bias$",),
)


class GPT2Block:
    """x + attention(norm(x)), then x + mlp(norm(x)); the sums are done by the norms."""

    def __init__(self, spec: ModelSpec, scale: float, layer: int, make: LayerFactory) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention_norm = make.layer_norm(size, eps)
        self.attention = make.attention(layer, heads, scale=scale)
        self.qkv = make.fused_qkv_linear(
            size, self.attention, self.attention_norm, bias=True, transposed=True
        )
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(size, size, bias=True, transposed=True, unit=spec.head_dim)
        self.mlp_norm = make.layer_norm(size, eps)
        self.mlp = make.mlp(
            size, spec.intermediate_size, spec.activation, bias=True, transposed=True
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] and the residual stream [T, E], which the next norm adds. The last block returns
        those of the wanted tokens."""
        x, residual = self.attention_norm.add(x, residual)
        x, residual = self.wanted(self.attention(self.qkv(x), positions, step), residual, step)
        x, residual = self.mlp_norm.add(self.output(x), residual)
        return self.mlp(x), residual


class GPT2Model:
    """`CausalLM` of GPT-2."""

    weight_map = WEIGHTS

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, GPT2Traits)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        self.embed_positions = make.embedding(spec.max_context, spec.hidden_size)
        self.blocks = [
            GPT2Block(spec, scale, layer, make)
            for layer, scale in enumerate(traits.attention_scales)
        ]
        self.norm = make.layer_norm(spec.hidden_size, spec.norm_eps)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x, residual = self.embed(token_ids), self.embed_positions(positions)
        for block in self.blocks:
            x, residual = block(x, residual, positions, step)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] → float32 [N, V]."""
        return self.lm_head(hidden)
