"""MPT (MosaicML 2023, "Introducing MPT-7B").

Differs from GPT-2: ALiBi instead of positions, no biases, weights stored [out, in].
"""

from __future__ import annotations

import math

import torch

from quire.compute.attention import ScoreOptions, StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.mpt import MPTTraits

__all__ = ["MPTModel", "alibi_slopes"]

WEIGHTS = WeightMap(
    prefix="transformer.",
    outer={"wte": "embed", "norm_f": "norm"},
    blocks="blocks.{}.",
    block={
        "norm_1": "attention_norm",
        "attn.Wqkv": "qkv",
        "attn.out_proj": "output",
        "norm_2": "mlp_norm",
        "ffn.up_proj": "mlp.up",
        "ffn.down_proj": "mlp.down",
    },
    embedding="transformer.wte.weight",
)


def alibi_slopes(num_heads: int, max_bias: float) -> list[float]:
    """2^(-max_bias · i / n) for i = 1 … n (Press et al. 2022, arXiv:2108.12409, section 3), n the
    next power of two; of more than there are heads, every second one first, as MPT was trained."""
    count = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-max_bias * i / count) for i in range(1, count + 1)]
    return slopes if count == num_heads else [*slopes[1::2], *slopes[::2]][:num_heads]


class MPTBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)); the sums are done by the norms."""

    def __init__(
        self, spec: ModelSpec, scale: float, scores: ScoreOptions, layer: int, make: LayerFactory
    ) -> None:
        size, eps = spec.hidden_size, spec.norm_eps
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention_norm = make.layer_norm(size, eps, bias=False)
        self.attention = make.attention(layer, heads, scale=scale, scores=scores)
        self.qkv = make.fused_qkv_linear(size, self.attention, self.attention_norm, bias=False)
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(size, size, bias=False, unit=spec.head_dim)
        self.mlp_norm = make.layer_norm(size, eps, bias=False)
        self.mlp = make.mlp(size, spec.intermediate_size, spec.activation, bias=False)

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
        x, residual = self.mlp_norm.add(self.output(x), residual)
        return self.mlp(x), residual


class MPTModel:
    """`CausalLM` of MPT."""

    weight_map = WEIGHTS

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, MPTTraits)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        scores = make.alibi(alibi_slopes(spec.num_heads, traits.max_bias))
        self.blocks = [
            MPTBlock(spec, traits.attention_scale, scores, layer, make)
            for layer in range(spec.num_layers)
        ]
        self.norm = make.layer_norm(spec.hidden_size, spec.norm_eps, bias=False)

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
