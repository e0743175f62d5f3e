"""Granite 4 (IBM 2025) and Mamba 2 (Dao and Gu 2024, arXiv:2405.21060): selective states, and in
Granite attention in some layers, with MLPs or experts behind both."""

from __future__ import annotations

import torch

from quire.base.errors import EngineError
from quire.compute.attention import StepInputs
from quire.compute.layers import LayerFactory
from quire.compute.models.hybrid.block import PLAIN, HybridModel, HybridStyle, Mixer
from quire.compute.models.weight_map import WeightMap
from quire.config import ModelSpec
from quire.config.families.mamba import SSDTraits
from quire.config.model_spec import LlamaTraits

__all__ = ["SSDModel"]

_OPERATOR = {
    "in_proj": "recurrent.space.inputs",
    "conv1d": "recurrent.space.conv",
    "norm": "recurrent.space.norm",
    "out_proj": "recurrent.output",
}


def _operator(prefix: str) -> dict[str, str]:
    """Return the places of an operator's tensors, by their names in a block."""
    names = {f"{prefix}.{name}": place for name, place in _OPERATOR.items()}
    return {**names, prefix: "recurrent.space.state"}


GRANITE = WeightMap(
    prefix="model.",
    outer={"embed_tokens": "embed", "norm": "norm"},
    blocks="layers.{}.",
    block={
        "input_layernorm": "mixer_norm",
        "self_attn.q_proj": "attention.qkv:q",
        "self_attn.k_proj": "attention.qkv:k",
        "self_attn.v_proj": "attention.qkv:v",
        "self_attn.o_proj": "attention.output",
        **_operator("mamba"),
        "post_attention_layernorm": "mlp_norm",
        "shared_mlp.input_linear": "mlp.gate_up",
        "shared_mlp.gate_proj": "mlp.gate_up:gate",
        "shared_mlp.up_proj": "mlp.gate_up:up",
        "shared_mlp.output_linear": "mlp.down",
    },
    embedding="model.embed_tokens.weight",
    ignored=(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",),
)
MAMBA = WeightMap(
    prefix="backbone.",
    outer={"embeddings": "embed", "norm_f": "norm"},
    blocks="layers.{}.",
    block={"norm": "mixer_norm", **_operator("mixer")},
    embedding="backbone.embeddings.weight",
    endings={"backbone.embedding.weight": "backbone.embeddings.weight"},
)


class ScaledAttention:
    """Grouped-query attention with a factor on scores of its own."""

    def __init__(
        self, spec: ModelSpec, traits: LlamaTraits, layer: int, make: LayerFactory
    ) -> None:
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention = make.attention(
            layer, heads, rope=spec.ropes[layer], scale=traits.attention_scale
        )
        size = spec.hidden_size
        self.qkv = make.qkv_linear(size, self.attention, None, bias=traits.qkv_bias)
        self.output = make.row(
            spec.num_heads * spec.head_dim, size, bias=traits.o_bias, unit=spec.head_dim
        )

    def mix(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Return what each token takes from those before it, [T, H · D]."""
        return self.attention(self.qkv(x), positions, step)


class StateOperator:
    """A selective state, whose heads are projected back."""

    def __init__(self, spec: ModelSpec, traits: SSDTraits, make: LayerFactory) -> None:
        size, heads = spec.hidden_size, traits.heads
        self.space = make.recurrent.state_space(
            size,
            heads,
            traits.taps,
            spec.norm_eps,
            bias=traits.bias,
            conv_bias=traits.conv_bias,
        )
        unit = heads.inner // heads.num_groups if heads.num_groups > 1 else heads.head_dim
        self.output = make.row(heads.inner, size, bias=traits.bias, unit=unit)

    def mix(self, x: torch.Tensor, positions: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Return what each token takes from those before it, [T, H · P]."""
        del positions
        return self.space(x, step)


class SSDModel(HybridModel):
    """`CausalLM`."""

    def __init__(self, spec: ModelSpec, make: LayerFactory) -> None:
        traits = spec.traits
        assert isinstance(traits, SSDTraits)
        granite = traits.granite

        def attend(layer: int) -> Mixer:
            if granite is None:
                raise EngineError(f"layer {layer} of a model without attention is to attend")
            return ScaledAttention(spec, granite, layer, make)

        style = PLAIN
        if granite is not None:
            style = HybridStyle(
                embedding_factor=granite.embedding_factor,
                residual_factor=granite.residual_factor,
                logit_factor=granite.logit_factor,
                fused_mlp=traits.fused_mlp,
            )
        super().__init__(
            spec,
            make,
            MAMBA if granite is None else GRANITE,
            attend=attend,
            recur=lambda: StateOperator(spec, traits, make),
            style=style,
        )
