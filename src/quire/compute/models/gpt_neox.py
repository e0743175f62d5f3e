"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia.

Differs from GPT-2: partly rotated heads instead of learned positions, attention and MLP side by
side, each over a norm of its own, and q, k and v head by head in one tensor.
"""

from __future__ import annotations

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.gpt import GPTNeoXTraits

__all__ = ["GPTNeoXModel"]

WEIGHTS = WeightMap(
    prefix="gpt_neox.",
    outer={"embed_in": "embed", "final_layer_norm": "norm"},
    blocks="layers.{}.",
    block={
        "input_layernorm": "attention_norm",
        "attention.query_key_value": "qkv",
        "attention.dense": "output",
        "post_attention_layernorm": "mlp_norm",
        "mlp.dense_h_to_4h": "mlp.up",
        "mlp.dense_4h_to_h": "mlp.down",
    },
    embedding="gpt_neox.embed_in.weight",
    head="embed_out.weight",
    ignored=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
)


class GPTNeoXBlock:
    """x + attention(norm(x)) + mlp(norm(x)), or the one after the other."""

    def __init__(
        self, spec: ModelSpec, traits: GPTNeoXTraits, layer: int, make: LayerFactory
    ) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention_norm = make.layer_norm(size, eps)
        self.attention = make.attention(layer, heads, rope=spec.ropes[layer])
        self.qkv = make.headwise_qkv_linear(
            size, self.attention, self.attention_norm, bias=traits.attention_bias
        )
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(size, size, bias=traits.attention_bias, unit=spec.head_dim)
        self.mlp_norm = make.layer_norm(size, eps)
        self.mlp = make.mlp(size, spec.intermediate_size, spec.activation, bias=True)
        self._sum = make.residual_add() if traits.is_parallel else None

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
        x, residual = self.wanted(self.attention(self.qkv(x), positions, step), residual, step)
        x = self.output(x)
        if self._sum is not None:
            return self._sum(self.mlp(self.mlp_norm(residual)), x), residual
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class GPTNeoXModel:
    """`CausalLM` of GPT-NeoX."""

    weight_map = WEIGHTS

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, GPTNeoXTraits)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        self.blocks = [GPTNeoXBlock(spec, traits, layer, make) for layer in range(spec.num_layers)]
        self.norm = make.layer_norm(spec.hidden_size, spec.norm_eps)

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
