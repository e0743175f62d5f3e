"""The Llama lineage: families that differ from Llama by traits and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from quire.base.errors import ConfigError
from quire.config.families.encoders.classes import with_classes
from quire.config.families.family import Family, without_head
from quire.config.families.gguf_names import BLOCK, GGUFNames
from quire.config.families.shared import (
    ACTIVATIONS,
    FULL,
    SLIDING,
    read_common,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_windows,
)
from quire.config.hf import RawConfig
from quire.config.model_spec import LlamaTraits, MatrixShape, ModelSpec, ParameterCounts
from quire.config.rope import extended_context, read_ropes

__all__ = [
    "FAMILIES",
    "GRANITE_NUMBERS",
    "read_granite",
    "read_llama",
    "read_llama_like",
    "read_mistral",
    "read_qwen2",
    "read_qwen3",
]

_ARCEE = {"max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5}
_PHI3 = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_GLM = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
_OLMO = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_MINISTRAL3 = {
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_SEED_OSS = {
    "max_position_embeddings": 524288,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
}
_HELIUM = {
    "max_position_embeddings": 4096,
    "head_dim": 128,
    "rms_norm_eps": 1e-8,
    "rope_theta": 1e5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_SMOLLM3 = {"max_position_embeddings": 32768, "num_key_value_heads": 4, "head_dim": None}
"""Values that these families mean where the file is silent."""


def read_llama(raw: RawConfig, dtype: str) -> ModelSpec:
    return _read_llama(raw, dtype, gated=True)


def _read_llama(raw: RawConfig, dtype: str, *, gated: bool) -> ModelSpec:
    bias = raw.read(bool, "attention_bias", "bias", default=False)
    mlp_bias = raw.read(bool, "mlp_bias", default=False)
    traits = LlamaTraits(qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, gated=gated)
    return read_llama_like(raw, dtype, traits, (FULL,) * read_num_layers(raw))


def read_arcee(raw: RawConfig, dtype: str) -> ModelSpec:
    """AFM-4.5B: Llama with a plain MLP."""
    return _read_llama(raw.with_defaults(_ARCEE), dtype, gated=False)


def read_mistral(raw: RawConfig, dtype: str) -> ModelSpec:
    layer_types = _mistral_layer_types(raw, read_num_layers(raw))
    return read_llama_like(raw, dtype, LlamaTraits(), layer_types)


def read_ministral3(raw: RawConfig, dtype: str) -> ModelSpec:
    """Queries grow beyond the length that YaRN starts from; all layers slide if there is a
    window."""
    raw = raw.with_defaults(_MINISTRAL3)
    if not raw.has("rope_parameters"):
        raw = RawConfig({**raw.as_dict(), "rope_parameters": _MINISTRAL3_ROPE}, raw.source)
    rope, growth = raw.section("rope_parameters"), None
    if rope is not None and rope.has("llama_4_scaling_beta"):
        length = rope.read_size("original_max_position_embeddings")
        growth = (rope.read(float, "llama_4_scaling_beta"), length)
    kind = SLIDING if raw.has("sliding_window") else FULL
    layer_types = (kind,) * read_num_layers(raw)
    return read_llama_like(raw, dtype, LlamaTraits(query_growth=growth), layer_types)


def read_qwen2(raw: RawConfig, dtype: str) -> ModelSpec:
    layer_types = _qwen_layer_types(raw, read_num_layers(raw))
    return read_llama_like(raw, dtype, LlamaTraits(qkv_bias=True), layer_types)


def read_qwen3(raw: RawConfig, dtype: str) -> ModelSpec:
    bias = raw.read(bool, "attention_bias", default=False)
    layer_types = _qwen_layer_types(raw, read_num_layers(raw))
    traits = LlamaTraits(qkv_bias=bias, o_bias=bias, qk_norm="head")
    return read_llama_like(raw, dtype, traits, layer_types)


def read_phi3(raw: RawConfig, dtype: str) -> ModelSpec:
    """Phi-3, 3.5 and 4: every scaling is LongRoPE, whatever the file calls it."""
    raw = raw.with_defaults(_PHI3)
    for key in ("rope_parameters", "rope_scaling"):
        section = raw.section(key)
        kind = None if section is None else section.read_optional(str, "rope_type", "type")
        if section is not None and kind in ("su", "yarn"):
            raw = raw.overridden({key: {**section.as_dict(), "rope_type": "longrope"}})
    layer_types = _mistral_layer_types(raw, read_num_layers(raw))
    return read_llama_like(raw, dtype, LlamaTraits(fused_qkv=True, fused_gate=True), layer_types)


def read_olmo2(raw: RawConfig, dtype: str) -> ModelSpec:
    return _read_olmo(raw, dtype, (FULL,) * read_num_layers(raw))


def read_olmo3(raw: RawConfig, dtype: str) -> ModelSpec:
    """Three layers in four slide; the scaling of positions is that of full layers alone."""
    raw = raw.with_defaults({"sliding_window": 4096})
    num_layers = read_num_layers(raw)
    by_pattern = tuple(SLIDING if (layer + 1) % 4 else FULL for layer in range(num_layers))
    layer_types = read_layer_types(raw, num_layers, by_pattern)
    raw = raw.with_defaults({"rope_theta": 5e5})
    section = raw.section("rope_parameters")
    if section is None or not (section.has(FULL) or section.has(SLIDING)):
        full = raw.section("rope_scaling")
        by_type = {FULL: {} if full is None else full.as_dict(), SLIDING: {}}
        plain = {"rope_type": "default"}
        raw = raw.overridden({"rope_parameters": {k: {**plain, **v} for k, v in by_type.items()}})
    return _read_olmo(raw, dtype, layer_types)


def _read_olmo(raw: RawConfig, dtype: str, layer_types: tuple[str, ...]) -> ModelSpec:
    raw = raw.with_defaults(_OLMO)
    bias = raw.read(bool, "attention_bias", default=False)
    traits = LlamaTraits(qkv_bias=bias, o_bias=bias, qk_norm="row", norms="after")
    return read_llama_like(raw, dtype, traits, layer_types)


def read_exaone4(raw: RawConfig, dtype: str) -> ModelSpec:
    """Full layers see no positions beside sliding ones: three in four if the file is silent."""
    raw = raw.with_defaults({**_OLMO, "sliding_window": 4096})
    num_layers, slides = read_num_layers(raw), raw.has("sliding_window")
    default = (FULL,) * num_layers
    if slides and not raw.has("layer_types"):
        pattern = raw.read_size("sliding_window_pattern", default=4)
        default = tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))
    layer_types = read_layer_types(raw, num_layers, default)
    traits = LlamaTraits(qk_norm="head", norms="after")
    spec = read_llama_like(raw, dtype, traits, layer_types)
    ropes = zip(spec.ropes, layer_types, strict=True)
    turned = tuple(rope if kind == SLIDING or not slides else None for rope, kind in ropes)
    return replace(spec, ropes=turned)


def read_glm(raw: RawConfig, dtype: str) -> ModelSpec:
    """GLM-4 as of 2024."""
    return _read_glm(raw, dtype, norms="before")


def read_glm4(raw: RawConfig, dtype: str) -> ModelSpec:
    """GLM-4 as of 2025: norms behind sublayers too."""
    return _read_glm(raw, dtype, norms="both")


def _read_glm(raw: RawConfig, dtype: str, *, norms: Literal["before", "both"]) -> ModelSpec:
    raw = raw.with_defaults(_GLM)
    bias = raw.read(bool, "attention_bias")
    traits = LlamaTraits(qkv_bias=bias, fused_gate=True, pairs_neighbours=True, norms=norms)
    return read_llama_like(raw, dtype, traits, (FULL,) * read_num_layers(raw))


def read_granite(raw: RawConfig, dtype: str) -> ModelSpec:
    """Granite 3 and 4, dense: factors on embeddings, sublayers, scores and logits."""
    bias = raw.read(bool, "attention_bias", default=False)
    divisor = raw.read(float, "logits_scaling", default=1.0)
    if not divisor:
        raise ConfigError(f"{raw.source}: logits_scaling is 0, by which logits are divided")
    traits = LlamaTraits(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=raw.read(bool, "mlp_bias", default=False),
        attention_scale=raw.read(float, "attention_multiplier", default=1.0),
        embedding_factor=raw.read(float, "embedding_multiplier", default=1.0),
        residual_factor=raw.read(float, "residual_multiplier", default=1.0),
        logit_factor=1.0 / divisor,
    )
    return read_llama_like(raw, dtype, traits, (FULL,) * read_num_layers(raw))


def read_seed_oss(raw: RawConfig, dtype: str) -> ModelSpec:
    """Seed-OSS: q, k and v have biases, and the output of attention has one by a key of its own."""
    raw = raw.with_defaults(_SEED_OSS)
    traits = LlamaTraits(
        qkv_bias=raw.read(bool, "attention_bias"),
        o_bias=raw.read(bool, "attention_out_bias", default=False),
        mlp_bias=raw.read(bool, "mlp_bias", default=False),
    )
    return read_llama_like(raw, dtype, traits, (FULL,) * read_num_layers(raw))


def read_helium(raw: RawConfig, dtype: str) -> ModelSpec:
    """Helium: rope turns neighbours; the output of attention has no bias."""
    raw = raw.with_defaults(_HELIUM)
    traits = LlamaTraits(
        qkv_bias=raw.read(bool, "attention_bias", default=False),
        mlp_bias=raw.read(bool, "mlp_bias", default=False),
        pairs_neighbours=True,
    )
    return read_llama_like(raw, dtype, traits, (FULL,) * read_num_layers(raw))


def read_smollm3(raw: RawConfig, dtype: str) -> ModelSpec:
    """Some layers, every fourth if the file is silent, see no positions; these slide if any do."""
    raw = raw.with_defaults(_SMOLLM3)
    num_layers = read_num_layers(raw)
    interval = raw.read_size("no_rope_layer_interval", default=4)
    has_rope = raw.read_list(int, "no_rope_layers")
    if has_rope is None:
        has_rope = tuple(int((layer + 1) % interval != 0) for layer in range(num_layers))
    if len(has_rope) != num_layers:
        raise ConfigError(
            f"{raw.source}: no_rope_layers has {len(has_rope)} entries for {num_layers} layers"
        )
    slides = raw.read(bool, "use_sliding_window", default=False) and raw.has("sliding_window")
    default = tuple(SLIDING if slides and not rope else FULL for rope in has_rope)
    bias = raw.read(bool, "attention_bias", default=False)
    traits = LlamaTraits(
        qkv_bias=bias, o_bias=bias, mlp_bias=raw.read(bool, "mlp_bias", default=False)
    )
    layer_types = read_layer_types(raw, num_layers, default)
    if not slides:
        layer_types = (FULL,) * num_layers
    spec = read_llama_like(raw, dtype, traits, layer_types, tied=True)
    ropes = zip(spec.ropes, has_rope, strict=True)
    return replace(spec, ropes=tuple(rope if turned else None for rope, turned in ropes))


def read_llama_like(
    raw: RawConfig,
    dtype: str,
    traits: LlamaTraits,
    layer_types: tuple[str, ...],
    *,
    tied: bool = False,
) -> ModelSpec:
    """tied: whether the LM head is the embedding where the file does not say."""
    hidden, intermediate = raw.read_size("hidden_size"), raw.read_size("intermediate_size")
    num_heads, num_kv_heads, head_dim = heads = read_heads(raw, hidden)
    common = read_common(raw, dtype, "llama", hidden, len(layer_types), heads)
    max_positions = raw.read_size("max_position_embeddings", default=2048)
    vocab = common["vocab_size"]
    tied = raw.read(bool, "tie_word_embeddings", default=tied)
    ropes = read_ropes(raw, layer_types, head_dim, max_positions)
    max_context = min(extended_context(rope, max_positions) for rope in ropes)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    layer = hidden * (2 * q_size + 2 * kv_size) + 2 * hidden
    layer += traits.qkv_bias * (q_size + 2 * kv_size) + traits.o_bias * hidden
    inner = (1 + traits.gated) * intermediate
    layer += hidden * (inner + intermediate) + traits.mlp_bias * (inner + hidden)
    layer += {None: 0, "head": 2 * head_dim, "row": q_size + kv_size}[traits.qk_norm]
    layer += 2 * hidden * (traits.norms == "both")
    head = hidden + (0 if tied else vocab * hidden)
    return ModelSpec(
        **common,
        intermediate_size=intermediate,
        activation=raw.read_choice(ACTIVATIONS, "hidden_act", default="silu"),
        norm_eps=raw.read(float, "rms_norm_eps", default=1e-6),
        max_context=max_context,
        tie_word_embeddings=tied,
        windows=read_windows(raw, layer_types),
        ropes=ropes,
        traits=traits,
        parameters=ParameterCounts(vocab * hidden, layer, head),
        matrices=(
            MatrixShape(q_size + 2 * kv_size, hidden, len(layer_types)),
            MatrixShape(hidden, q_size, len(layer_types)),
            MatrixShape(inner, hidden, len(layer_types)),
            MatrixShape(hidden, intermediate, len(layer_types)),
            MatrixShape(vocab, hidden, is_head=True),
        ),
        eos_token_ids=raw.read_ids("eos_token_id"),
    )


def _mistral_layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """All layers slide if there is a window, unless `layer_types` says which (Ministral)."""
    kind = SLIDING if raw.has("sliding_window") else FULL
    return read_layer_types(raw, num_layers, (kind,) * num_layers)


def _qwen_layer_types(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Layers from `max_window_layers` on slide, if `use_sliding_window`."""
    first = num_layers
    if raw.read(bool, "use_sliding_window", default=False) and raw.has("sliding_window"):
        first = raw.read(int, "max_window_layers", default=28)
    default = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return read_layer_types(raw, num_layers, default)


_MODEL = "quire.compute.models.llama:LlamaModel"

_TEXT = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL_TEXT = {
    **_TEXT,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_MINISTRAL3_TEXT = {
    **_TEXT,
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
}
_QWEN_TEXT = {
    **_TEXT,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_QWEN2_5_VL_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3_VL_TEXT = {
    **_QWEN_TEXT,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}
"""Values of `transformers` for a text model in a model of more parts."""

_PHI3_BLOCK = {**BLOCK, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM4_BLOCK = {
    **BLOCK,
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_OLMO2_BLOCK = {
    **BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GRANITE_NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
)
"""Names in GGUF files, also of Granite with experts."""

FAMILIES = (
    Family(
        "Llama 2, 3, 3.1 and what shares its code",
        _MODEL,
        "llama",
        {
            "LlamaForCausalLM": read_llama,
            "LLaMAForCausalLM": read_llama,
            "LlamaForSequenceClassification": with_classes(read_llama),
            "LlamaModel": without_head(read_llama),
        },
        GGUFNames("llama", BLOCK, pairs_heads=True),
        _TEXT,
    ),
    Family("Arcee (AFM)", _MODEL, "arcee", {"ArceeForCausalLM": read_arcee}),
    Family(
        "Mistral",
        _MODEL,
        "mistral",
        {
            "MistralForCausalLM": read_mistral,
            "MistralForSequenceClassification": with_classes(read_mistral),
            "MistralModel": without_head(read_mistral),
        },
        text_defaults=_MISTRAL_TEXT,
    ),
    Family(
        "Ministral 3",
        _MODEL,
        "ministral3",
        {"Ministral3ForCausalLM": read_ministral3},
        text_defaults=_MINISTRAL3_TEXT,
    ),
    Family(
        "Qwen2",
        _MODEL,
        "qwen2",
        {
            "Qwen2ForCausalLM": read_qwen2,
            "Qwen2ForSequenceClassification": with_classes(read_qwen2),
            "Qwen2Model": without_head(read_qwen2),
        },
        GGUFNames("qwen2", BLOCK, ropes=("dimension_sections",), also=("qwen2vl",)),
        _QWEN_TEXT,
        {"qwen2_5_vl_text": _QWEN2_5_VL_TEXT},
    ),
    Family(
        "Qwen3",
        _MODEL,
        "qwen3",
        {
            "Qwen3ForCausalLM": read_qwen3,
            "Qwen3ForSequenceClassification": with_classes(read_qwen3),
            "Qwen3Model": without_head(read_qwen3),
        },
        GGUFNames("qwen3", BLOCK, ropes=("dimension_sections",), also=("qwen3vl",)),
        {**_QWEN_TEXT, "head_dim": 128},
        {"qwen3_vl_text": _QWEN3_VL_TEXT},
    ),
    Family(
        "Phi-3, 3.5, 4",
        _MODEL,
        "phi3",
        {
            "Phi3ForCausalLM": read_phi3,
            "Phi3ForSequenceClassification": with_classes(read_phi3),
            "Phi3Model": without_head(read_phi3),
        },
        GGUFNames("phi3", _PHI3_BLOCK, partly_rotated=True),
    ),
    Family(
        "OLMo 2",
        _MODEL,
        "olmo2",
        {"Olmo2ForCausalLM": read_olmo2},
        GGUFNames("olmo2", _OLMO2_BLOCK),
    ),
    Family(
        "OLMo 3",
        _MODEL,
        "olmo3",
        {"Olmo3ForCausalLM": read_olmo3},
        GGUFNames("olmo2", _OLMO2_BLOCK, told_by="attention.sliding_window"),
    ),
    Family(
        "Granite 3, dense",
        _MODEL,
        "granite",
        {"GraniteForCausalLM": read_granite},
        GGUFNames("granite", BLOCK, pairs_heads=True, numbers=GRANITE_NUMBERS),
    ),
    Family("GLM-4 of 2024", _MODEL, "glm", {"GlmForCausalLM": read_glm}),
    Family(
        "GLM-4 of 2025",
        _MODEL,
        "glm4",
        {"Glm4ForCausalLM": read_glm4},
        GGUFNames("glm4", _GLM4_BLOCK, partly_rotated=True),
    ),
    Family("EXAONE 4", _MODEL, "exaone4", {"Exaone4ForCausalLM": read_exaone4}),
    Family(
        "Seed-OSS",
        _MODEL,
        "seed_oss",
        {"SeedOssForCausalLM": read_seed_oss},
        GGUFNames("seed_oss", {**BLOCK, "post_attention_norm": "post_attention_layernorm"}),
    ),
    Family("Helium", _MODEL, "helium", {"HeliumForCausalLM": read_helium}),
    Family(
        "SmolLM3",
        _MODEL,
        "smollm3",
        {"SmolLM3ForCausalLM": read_smollm3},
        GGUFNames("smollm3", BLOCK, pairs_heads=True),
    ),
)
