"""Layers of ERNIE 4.5, and the names of their tensors on disk.

`LayerFactory` makes layers in the dtype, the format and by the kernels that the engine chose. It is
told sizes of the whole model, and of a projection whether ranks share its outputs or its inputs.
"""

from __future__ import annotations

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models import WeightMap
from quire.config import ModelSpec
from quire_ernie.spec import ErnieTraits

__all__ = ["ErnieModel"]

WEIGHTS = WeightMap(
    prefix="model.",
    outer={"embed_tokens": "embed", "norm": "norm"},
    blocks="layers.{}.",
    block={  # name on disk: attribute of the block, and ":part" of a merged layer
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "qkv:q",
        "self_attn.k_proj": "qkv:k",
        "self_attn.v_proj": "qkv:v",
        "self_attn.o_proj": "output",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate_up:gate",
        "mlp.up_proj": "mlp.gate_up:up",
        "mlp.down_proj": "mlp.down",
    },
    embedding="model.embed_tokens.weight",
)


class ErnieBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)). The sums are done by the norms, so that one
    kernel does both: a block gives its last output and the stream, and whoever comes next adds."""

    def __init__(self, spec: ModelSpec, bias: bool, layer: int, make: LayerFactory) -> None:
        size = spec.hidden_size
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention_norm = make.rms_norm(size, spec.norm_eps)
        self.attention = make.attention(layer, heads, rope=spec.ropes[layer])
        # On disk the two rows of a rotated pair are neighbours.
        self.qkv = make.qkv_linear(
            size, self.attention, self.attention_norm, bias=bias, pairs_neighbours=True
        )
        self.wanted = make.wanted_tokens(is_last=layer == spec.num_layers - 1)
        self.output = make.row(spec.num_heads * spec.head_dim, size, bias=bias)
        self.mlp_norm = make.rms_norm(size, spec.norm_eps)
        self.mlp = make.gated_mlp(size, spec.intermediate_size, spec.activation, bias=bias)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        step: StepInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, E] and the residual stream [T, E]; of the last block those of the wanted tokens."""
        x, residual = self.attention_norm.add(x, residual)
        x, residual = self.wanted(self.attention(self.qkv(x), positions, step), residual, step)
        x, residual = self.mlp_norm.add(self.output(x), residual)
        return self.mlp(x), residual


class ErnieModel:
    """Model that the entry point names. It is made of a spec and a factory, and has `blocks` and a
    `weight_map`."""

    weight_map = WEIGHTS

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, ErnieTraits)
        self.embed, self.lm_head = make.embedding_and_head(
            spec.vocab_size, spec.hidden_size, tied=spec.tie_word_embeddings
        )
        self.blocks = [ErnieBlock(spec, traits.bias, i, make) for i in range(spec.num_layers)]
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
