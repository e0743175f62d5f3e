"""The Gemma lineage: Gemma 2 and Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from quire.config.families.family import Family, without_head
from quire.config.families.gguf_names import BLOCK, GGUFNames
from quire.config.families.llama import read_llama_like
from quire.config.families.shared import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    read_layer_types,
    read_num_layers,
    read_windows,
)
from quire.config.hf import RawConfig
from quire.config.model_spec import LlamaTraits, ModelSpec
from quire.config.rope import RopeSpec, extended_context, read_ropes

__all__ = ["FAMILIES", "GEMMA_BLOCK", "Gemma2Traits", "Gemma3Traits"]

GEMMA_BLOCK: Mapping[str, str] = MappingProxyType(
    {
        **BLOCK,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
"""Names in GGUF files, also of Gemma 4."""


@dataclass(frozen=True, slots=True)
class Gemma2Traits:
    """Gemma 2: biases around attention, the factor on q·k, and the caps of scores and logits."""

    bias: bool
    attention_scale: float
    score_cap: float | None
    logit_cap: float | None


@dataclass(frozen=True, slots=True)
class Gemma3Traits(Gemma2Traits):
    """Gemma 3: Gemma 2 with norms on the heads of q and k."""


def read_gemma2(raw: RawConfig, dtype: str) -> ModelSpec:
    raw.reject("use_bidirectional_attention", True, "quire serves decoder-only models")
    num_layers = read_num_layers(raw)
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


def read_gemma3(raw: RawConfig, dtype: str) -> ModelSpec:
    raw.reject("use_bidirectional_attention", True, "quire serves decoder-only models")
    num_layers = read_num_layers(raw)
    pattern = raw.read_size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    by_pattern = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    layer_types = read_layer_types(raw, num_layers, by_pattern)
    bias = raw.read(bool, "attention_bias", default=False)
    as_llama = LlamaTraits(qkv_bias=bias, o_bias=bias, qk_norm="head")
    spec = read_llama_like(raw, dtype, as_llama, layer_types, tied=True)
    ropes = _gemma3_ropes(raw, spec, layer_types)
    max_positions = raw.read_size("max_position_embeddings", default=2048)
    max_context = min(extended_context(rope, max_positions) for rope in ropes)
    counts, logit_cap = spec.parameters, raw.read_optional(float, "final_logit_softcapping")
    score_cap = raw.read_optional(float, "attn_logit_softcapping")
    return replace(
        spec,
        activation=raw.read_choice(
            ACTIVATIONS, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"
        ),
        max_context=max_context,
        windows=read_windows(raw, layer_types),
        ropes=ropes,
        traits=Gemma3Traits(
            bias,
            raw.read_size("query_pre_attn_scalar", default=256) ** -0.5,
            score_cap,
            logit_cap,
        ),
        parameters=replace(counts, layer=counts.layer + 2 * spec.hidden_size),
        score_options=frozenset({"soft_cap"} if score_cap is not None else ()),
    )


def _gemma3_ropes(
    raw: RawConfig, spec: ModelSpec, layer_types: tuple[str, ...]
) -> tuple[RopeSpec, ...]:
    """Full layers have a base of 1e6 and the scaling; sliding ones `rope_local_base_freq`, 1e4 if
    the file is silent, and no scaling."""
    max_positions = raw.read_size("max_position_embeddings", default=2048)
    section = raw.section("rope_parameters")
    if section is not None and (section.has(FULL) or section.has(SLIDING)):
        return read_ropes(raw, layer_types, spec.head_dim, max_positions, theta=1e6)
    local = RopeSpec(spec.head_dim, raw.read(float, "rope_local_base_freq", default=1e4))
    (full,) = read_ropes(raw, (FULL,), spec.head_dim, max_positions, theta=1e6)
    by_type: Mapping[str, RopeSpec] = {FULL: full, SLIDING: local}
    return tuple(by_type[kind] for kind in layer_types)


_MODEL = "quire.compute.models.gemma2:Gemma2Model"
_TEXT = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}
"""Values of `transformers` for a text model in a model of more parts."""

FAMILIES = (
    Family(
        "Gemma 2",
        _MODEL,
        "gemma2",
        {"Gemma2ForCausalLM": read_gemma2, "Gemma2Model": without_head(read_gemma2)},
        text_defaults={**_TEXT, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    Family(
        "Gemma 3, text",
        _MODEL,
        "gemma3_text",
        {"Gemma3ForCausalLM": read_gemma3, "Gemma3TextModel": without_head(read_gemma3)},
        GGUFNames("gemma3", GEMMA_BLOCK, adds_one=True, ropes=("freq_base_swa",)),
        {**_TEXT, "vocab_size": 262208, "max_position_embeddings": 131072},
    ),
)
