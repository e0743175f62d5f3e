"""The Gemma lineage: Gemma 2 and Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
from quire.config.model_spec import Gemma2Traits, Gemma3Traits, LlamaTraits, ModelSpec, RopeSpec
from quire.config.rope import extended_context, read_ropes

__all__ = ["read_gemma2", "read_gemma3"]


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
