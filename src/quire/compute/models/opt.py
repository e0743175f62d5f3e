"""OPT (Zhang et al. 2022, arXiv:2205.01068).

Differs from Llama: learned positions (ids start at 2), LayerNorm, biases everywhere, a plain MLP
with ReLU. OPT-350m alone norms after each sublayer, has no final norm, and embeds in a narrower
space with projections in and out.
"""

from __future__ import annotations

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.gpt import OPTTraits

__all__ = ["OPTModel"]

POSITION_OFFSET = 2

WEIGHTS = WeightMap(
    prefix="model.",
    outer={
        "decoder.embed_tokens": "embed",
        "decoder.embed_positions": "embed_positions",
        "decoder.project_in": "project_in",
        "decoder.project_out": "project_out",
        "decoder.final_layer_norm": "norm",
    },
    blocks="decoder.layers.{}.",
    block={
        "self_attn_layer_norm": "attention_norm",
        "self_attn.q_proj": "qkv:q",
        "self_attn.k_proj": "qkv:k",
        "self_attn.v_proj": "qkv:v",
        "self_attn.out_proj": "output",
        "final_layer_norm": "mlp_norm",
        "fc1": "mlp.up",
        "fc2": "mlp.down",
    },
    embedding="model.decoder.embed_tokens.weight",
)


class OPTBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)), the sums done by the norms; or the norms after
    the sums, and nothing left to add."""

    def __init__(self, spec: ModelSpec, traits: OPTTraits, layer: int, make: LayerFactory) -> None:
        size, bias = spec.hidden_size, traits.bias
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._norm_before = traits.norm_before
        self.attention_norm = make.layer_norm(size, spec.norm_eps, affine=traits.norm_affine)
        self.attention = make.attention(layer, heads)
        self.qkv = make.qkv_linear(size, self.attention, self.attention_norm, bias=bias)
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(size, size, bias=bias, unit=spec.head_dim)
        self.mlp_norm = make.layer_norm(size, spec.norm_eps, affine=traits.norm_affine)
        self.mlp = make.mlp(size, spec.intermediate_size, spec.activation, bias=bias)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [T, E] and the residual stream [T, E], which the next norm adds. The last block returns
        those of the wanted tokens."""
        if self._norm_before:
            x, residual = self.attention_norm.add(x, residual)
            x, residual = self.wanted(self._attend(x, positions, step), residual, step)
            x, residual = self.mlp_norm.add(self.output(x), residual)
            return self.mlp(x), residual
        attended, x = self.wanted(self._attend(x, positions, step), x, step)
        x, _ = self.attention_norm.add(self.output(attended), x)
        x, _ = self.mlp_norm.add(self.mlp(x), x)
        return x, None

    def _attend(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        return self.attention(self.qkv(x), positions, step)


class OPTModel:
    """`CausalLM` of OPT."""

    weight_map = WEIGHTS

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, OPTTraits)
        size, embed_size = spec.hidden_size, traits.embed_size
        narrow = embed_size != size
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, embed_size, tied=spec.tie_word_embeddings
        )
        self.embed_positions = make.embedding(
            spec.max_context + POSITION_OFFSET, size, offset=POSITION_OFFSET
        )
        self.add = make.residual_add()
        self.project_in = make.replicated(embed_size, size, bias=False) if narrow else None
        self.blocks = [OPTBlock(spec, traits, layer, make) for layer in range(spec.num_layers)]
        self.norm = (
            make.layer_norm(size, spec.norm_eps, affine=traits.norm_affine)
            if traits.final_norm
            else None
        )
        self.project_out = make.replicated(size, embed_size, bias=False) if narrow else None

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: StepInputs
    ) -> torch.Tensor:
        """token_ids [T], positions [T] → hidden [N, E] of the wanted tokens."""
        x = self.embed(token_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x, residual = self.add(x, self.embed_positions(positions)), None
        for block in self.blocks:
            x, residual = block(x, residual, positions, step)
        return self.add(x, residual) if self.norm is None else self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, E] → float32 [N, V]."""
        return self.lm_head(hidden if self.project_out is None else self.project_out(hidden))
