"""The Gemma lineage: Gemma 2."""

from __future__ import annotations

from dataclasses import replace

from quire.config.families.llama import read_llama_like
from quire.config.families.shared import ACTIVATIONS, FULL, SLIDING, read_layer_types
from quire.config.hf import RawConfig
from quire.config.model_spec import Gemma2Traits, LlamaTraits, ModelSpec

__all__ = ["read_gemma2"]


def read_gemma2(raw: RawConfig, dtype: str) -> ModelSpec:
    raw.reject("use_bidirectional_attention", True, "quire serves decoder-only models")
    num_layers = raw.read_size("num_hidden_layers")
    alternating = tuple(FULL if layer % 2 else SLIDING for layer in range(num_layers))
    layer_types = read_layer_types(raw, num_layers, alternating)
    bias = raw.read(bool, "attention_bias", default=False)
    score_cap = raw.read_optional(float, "attn_logit_softcapping")
    as_llama = LlamaTraits(qkv_bias=bias, o_bias=bias)
    spec = read_llama_like(raw, dtype, as_llama, layer_types, tied=True)
    counts = spec.parameters
    return replace(
        spec,
        activation=raw.read_choice(
            ACTIVATIONS, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"
        ),
        traits=Gemma2Traits(
            bias,
            raw.read_size("query_pre_attn_scalar", default=256) ** -0.5,
            score_cap,
            raw.read_optional(float, "final_logit_softcapping"),
        ),
        parameters=replace(counts, layer=counts.layer + 2 * spec.hidden_size),
        score_options=frozenset({"soft_cap"} if score_cap is not None else ()),
    )
