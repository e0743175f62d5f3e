"""Command R (Cohere 2024) and its successors: attention and MLP side by side, over one norm.

Differs from Llama: layer norms without biases, pairs of neighbours in rotated heads, and a factor
on logits. By `ModelSpec`, some layers slide and the others see no positions (Command R7B).
"""

from __future__ import annotations

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.cohere import CohereTraits

__all__ = ["CohereModel"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={"embed_tokens": "embed", "norm": "norm"},
    blocks="layers.{}.",
    block={
        "input_layernorm": "block_norm",
        "self_attn.q_proj": "qkv:q",
        "self_attn.k_proj": "qkv:k",
        "self_attn.v_proj": "qkv:v",
        "self_attn.o_proj": "output",
        "mlp.gate_proj": "mlp.gate_up:gate",
        "mlp.up_proj": "mlp.gate_up:up",
        "mlp.down_proj": "mlp.down",
    },
    embedding="model.embed_tokens.weight",
)


class CohereBlock:
    """x + attention(norm(x)) + mlp(norm(x)); the next norm does the last sum."""

    def __init__(
        self, spec: ModelSpec, traits: CohereTraits, layer: int, make: LayerFactory
    ) -> None:
        size = spec.hidden_size
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.block_norm = make.layer_norm(size, spec.norm_eps, bias=False)
        self.attention = make.attention(layer, heads, rope=spec.ropes[layer])
        self.qkv = make.qkv_linear(
            size, self.attention, self.block_norm, bias=traits.bias, pairs_neighbours=True
        )
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(
            spec.num_heads * spec.head_dim, size, bias=traits.bias, unit=spec.head_dim
        )
        self.mlp = make.gated_mlp(size, spec.intermediate_size, spec.activation)
        self.sum = make.residual_add()

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] and the residual stream [T, E], which the next norm adds. The last block returns
        those of the wanted tokens."""
        x, residual = self.block_norm.add(x, residual)
        attended = self.attention(self.qkv(x), positions, step)
        attended, x, residual = self.wanted.of(step, attended, x, residual)
        return self.sum(self.mlp(x), self.output(attended)), residual


class CohereModel:
    """`CausalLM` of Cohere and Cohere 2."""

    weight_map = WEIGHTS

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, CohereTraits)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        self.blocks = [CohereBlock(spec, traits, layer, make) for layer in range(spec.num_layers)]
        self.norm = make.layer_norm(spec.hidden_size, spec.norm_eps, bias=False)
        self._factor = make.scale(traits.logit_factor, is_rounded=False)

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
        return self._factor(self.lm_head(hidden))
