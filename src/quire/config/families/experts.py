"""Families with mixtures of experts: layers of a dense family, some with experts for an MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from quire.base.errors import ConfigError
from quire.config.families.centered import read_centered
from quire.config.families.family import Family
from quire.config.families.gguf_names import (
    PROJECTIONS,
    SHARED_GATE,
    GGUFNames,
    expert_block,
)
from quire.config.families.lfm2 import GGUF_NAMES, read_lfm2
from quire.config.families.llama import (
    GRANITE_NUMBERS,
    read_granite,
    read_llama_like,
    read_mistral,
    read_qwen2,
    read_qwen3,
)
from quire.config.families.mamba import GRANITE_GGUF, SPLIT_MLP, SSD_MODEL, read_granite_hybrid
from quire.config.families.mtp import read_mtp_layers
from quire.config.families.qwen3_next import (
    GGUF_BLOCK,
    QWEN3_5_MOE_TEXT,
    delta_gguf,
    read_delta,
)
from quire.config.families.qwen3_next import MODEL as DELTA_MODEL
from quire.config.families.shared import FULL, SLIDING, read_layer_types, read_num_layers
from quire.config.hf import RawConfig
from quire.config.model_spec import (
    CenteredTraits,
    ExpertNames,
    ExpertsSpec,
    LlamaTraits,
    MatrixShape,
    ModelSpec,
    Routing,
)

__all__ = ["FAMILIES", "with_deepseek_experts"]

_MIXTRAL = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_OLMOE = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_PHIMOE = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_GLM4_MOE = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_GPT_OSS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "attention_bias": True,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Values that these families mean where the file is silent."""


def read_mixtral(raw: RawConfig, dtype: str) -> ModelSpec:
    raw = raw.with_defaults(_MIXTRAL)
    spec = read_mistral(raw, dtype)
    routing = _routing(raw, "num_local_experts", 8, top_k=2)
    return _with_experts(spec, routing, spec.intermediate_size, "mixtral")


def read_qwen2_moe(raw: RawConfig, dtype: str) -> ModelSpec:
    """Beside the experts a network of all tokens, which counts by a gate of its own."""
    if not raw.read(bool, "qkv_bias", default=True):
        raise ConfigError(f"{raw.source}: qkv_bias=False is not supported; use a model with biases")
    spec = read_qwen2(raw, dtype)
    return _with_experts(
        spec,
        _routing(raw, "num_experts", 60, top_k=4, renormalise=False),
        raw.read_size("moe_intermediate_size", default=1408),
        "qwen",
        layers=_qwen_layers(raw, spec.num_layers),
        shared_size=raw.read_size("shared_expert_intermediate_size", default=5632),
        shared_gated=True,
    )


def read_qwen3_moe(raw: RawConfig, dtype: str) -> ModelSpec:
    spec = read_qwen3(raw, dtype)
    return _with_experts(
        spec,
        _routing(raw, "num_experts", 128, top_k=8, renormalise=False),
        raw.read_size("moe_intermediate_size", default=768),
        "qwen",
        layers=_qwen_layers(raw, spec.num_layers),
    )


def read_olmoe(raw: RawConfig, dtype: str) -> ModelSpec:
    raw = raw.with_defaults(_OLMOE)
    if raw.has("clip_qkv"):
        raise raw.unsupported("clip_qkv", raw.read(float, "clip_qkv"), ("null",))
    bias = raw.read(bool, "attention_bias", default=False)
    traits = LlamaTraits(qkv_bias=bias, o_bias=bias, qk_norm="row")
    spec = read_llama_like(raw, dtype, traits, (FULL,) * read_num_layers(raw))
    routing = _routing(raw, "num_experts", 64, top_k=8, renormalise=False)
    return _with_experts(spec, routing, spec.intermediate_size, "qwen")


def read_phimoe(raw: RawConfig, dtype: str) -> ModelSpec:
    """Phi-3.5-MoE: layer norms, and a router that mixes two experts."""
    raw = raw.with_defaults(_PHIMOE)
    bias = raw.read(bool, "attention_bias", default=False)
    traits = CenteredTraits(
        "phimoe",
        qkv_bias=bias,
        o_bias=bias,
        gated=True,
        head_bias=raw.read(bool, "lm_head_bias", default=False),
    )
    spec = read_centered(raw, dtype, traits, "rms_norm_eps", slides=raw.has("sliding_window"))
    if traits.head_bias and spec.tie_word_embeddings:
        raise ConfigError(
            f"{raw.source}: lm_head_bias=True with tie_word_embeddings=True is not supported"
        )
    jitter = raw.read(float, "router_jitter_noise", default=0.01)
    routing = _routing(raw, "num_local_experts", 16, top_k=2)
    if routing.top_k != 2:
        raise raw.unsupported("num_experts_per_tok", str(routing.top_k), ("2",))
    routing = replace(routing, score="mixer", renormalise=False, jitter=jitter)
    return _with_experts(spec, routing, spec.intermediate_size, "mixtral")


def read_granite_moe(raw: RawConfig, dtype: str) -> ModelSpec:
    spec = read_granite(raw, dtype)
    routing = _routing(raw, "num_local_experts", 8, top_k=2)
    return _with_experts(spec, routing, spec.intermediate_size, "granite")


def read_granite_4(raw: RawConfig, dtype: str) -> ModelSpec:
    """Granite 4, with experts unless their number is 0, beside a network of all tokens."""
    raw, spec = read_granite_hybrid(raw, dtype)
    if raw.read_optional(int, "num_local_experts") == 0:
        return spec
    return _with_experts(
        spec,
        _routing(raw, "num_local_experts", 8, top_k=2),
        raw.read_size("intermediate_size"),
        "granite_hybrid",
        shared_size=spec.intermediate_size,
        shared_fused=not raw.has(SPLIT_MLP),
    )


def read_glm4_moe(raw: RawConfig, dtype: str) -> ModelSpec:
    """GLM-4.5 and later: the router of DeepSeek-V3, a network of all tokens, dense layers first."""
    raw = raw.with_defaults(_GLM4_MOE)
    bias = raw.read(bool, "attention_bias", default=False)
    qk_norm = "head" if raw.read(bool, "use_qk_norm", default=False) else None
    traits = LlamaTraits(qkv_bias=bias, qk_norm=qk_norm)
    spec = read_llama_like(raw, dtype, traits, (FULL,) * read_num_layers(raw))
    spec = replace(spec, mtp_layers=read_mtp_layers(raw, spec.num_layers, default=1))
    return with_deepseek_experts(raw, spec, score="sigmoid")


def with_deepseek_experts(
    raw: RawConfig, spec: ModelSpec, *, score: Literal["softmax", "sigmoid"]
) -> ModelSpec:
    """Put the experts of DeepSeek in place of MLPs, but for the first ones: experts of V3
    (arXiv:2412.19437, section 2.1.2), chosen by sigmoids, or of V2 (arXiv:2405.04434, section 2.2),
    chosen by a softmax. Beside them is a network of all tokens."""
    is_sigmoid = score == "sigmoid"
    method = raw.read_optional(str, "topk_method")
    has_groups = is_sigmoid or method == "group_limited_greedy"
    known = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
    if method is not None and method not in known:
        raise raw.unsupported("topk_method", method, known)
    if raw.has("scoring_func") and raw.read(str, "scoring_func") != score:
        raise raw.unsupported("scoring_func", raw.read(str, "scoring_func"), (score,))
    routing = replace(
        _routing(raw, "n_routed_experts", 64, top_k=8, renormalise=is_sigmoid),
        score=score,
        scale=raw.read(float, "routed_scaling_factor", default=1.0),
        biased=is_sigmoid,
        num_groups=raw.read_size("n_group", default=1) if has_groups else 1,
        top_groups=raw.read_size("topk_group", default=1) if has_groups else 1,
        group_best=2 if is_sigmoid else 1,
    )
    if routing.renormalise and not is_sigmoid:  # as published, it would not be scaled
        raise raw.unsupported("norm_topk_prob", value=True, supported=("false",))
    _check_groups(raw, routing)
    inner = raw.read_size("moe_intermediate_size")
    num_shared = raw.read(int, "n_shared_experts", default=0)
    return _with_experts(
        spec,
        routing,
        inner,
        "deepseek",
        layers=_deepseek_layers(raw, spec.num_layers),
        shared_size=inner * num_shared or None,
    )


def _deepseek_layers(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts, as `mlp_layer_types` or the number of dense layers
    says."""
    kinds = raw.read_list(str, "mlp_layer_types")
    if kinds is None:
        dense = raw.read(int, "first_k_dense_replace", default=0)
        return tuple(layer >= dense for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise ConfigError(
            f"{raw.source}: mlp_layer_types={list(kinds)} must be 'dense' or 'sparse' for each of "
            f"num_hidden_layers={num_layers} layers"
        )
    return tuple(kind == "sparse" for kind in kinds)


def read_lfm2_moe(raw: RawConfig, dtype: str) -> ModelSpec:
    """LFM2 with dense layers first, whose size is as stated, and a router of sigmoids."""
    raw = raw.overridden({"block_auto_adjust_ff_dim": False})
    spec = read_lfm2(raw, dtype)
    dense = raw.read(int, "num_dense_layers", default=2)
    routing = replace(
        _routing(raw, "num_experts", 32, top_k=4, renormalise=True),
        score="sigmoid",
        scale=raw.read(float, "routed_scaling_factor", default=1.0),
        biased=raw.read(bool, "use_expert_bias", default=True),
    )
    return _with_experts(
        spec,
        routing,
        raw.read_size("moe_intermediate_size", default=1792),
        "lfm2",
        layers=tuple(layer >= dense for layer in range(spec.num_layers)),
    )


def read_qwen3_next(raw: RawConfig, dtype: str) -> ModelSpec:
    """Gated delta rules with matrices by key head, and experts beside one of all tokens."""
    spec = read_delta(raw, dtype, "by_key")
    return _qwen_delta_experts(raw, spec, _qwen_layers(raw, spec.num_layers), 512, top_k=10)


def read_qwen3_5_moe(raw: RawConfig, dtype: str) -> ModelSpec:
    spec = read_delta(raw, dtype)
    return _qwen_delta_experts(raw, spec, (True,) * spec.num_layers, 256, top_k=8)


def _qwen_delta_experts(
    raw: RawConfig, spec: ModelSpec, layers: tuple[bool, ...], num_experts: int, *, top_k: int
) -> ModelSpec:
    return _with_experts(
        spec,
        _routing(raw, "num_experts", num_experts, top_k=top_k, renormalise=True),
        raw.read_size("moe_intermediate_size", default=512),
        "qwen",
        layers=layers,
        shared_size=raw.read_size("shared_expert_intermediate_size", default=512),
        shared_gated=True,
    )


def read_gpt_oss(raw: RawConfig, dtype: str) -> ModelSpec:
    """Every other layer slides, from the first on; heads have sinks, experts biases and a clamped
    gate, whose numbers the kernels know."""
    for key, value in _SWIGLU.items():
        if raw.read(float, key, default=value) != value:
            raise raw.unsupported(key, str(raw.read(float, key)), (str(value),))
    raw = raw.with_defaults(_GPT_OSS)
    if not raw.has("rope_parameters") and not raw.has("rope_scaling"):
        raw = raw.overridden({"rope_scaling": _GPT_OSS_ROPE})
    num_layers = read_num_layers(raw)
    alternating = tuple(FULL if layer % 2 else SLIDING for layer in range(num_layers))
    layer_types = read_layer_types(raw, num_layers, alternating)
    bias = raw.read(bool, "attention_bias")
    traits = LlamaTraits(qkv_bias=bias, o_bias=bias, sinks=True)
    spec = read_llama_like(raw, dtype, traits, layer_types)
    counts = replace(spec.parameters, layer=spec.parameters.layer + spec.num_heads)
    spec = replace(
        spec,
        activation="swiglu_clamped",
        parameters=counts,
        score_options=frozenset({"sinks"}),
    )
    routing = _routing(raw, "num_local_experts", 128, top_k=4)
    return _with_experts(spec, routing, spec.intermediate_size, "gpt_oss", bias=True)


def _routing(
    raw: RawConfig, key: str, num_experts: int, *, top_k: int, renormalise: bool | None = None
) -> Routing:
    """key: key of the number of experts. renormalise: default where the file does not say; None for
    a family that always renormalises."""
    num_experts = raw.read_size(key, "num_experts", "num_local_experts", default=num_experts)
    top_k = raw.read_size("num_experts_per_tok", default=top_k)
    if top_k > num_experts:
        raise ConfigError(
            f"{raw.source}: num_experts_per_tok={top_k} must be at most {key}={num_experts}"
        )
    if renormalise is not None:
        renormalise = raw.read(bool, "norm_topk_prob", default=renormalise)
    return Routing(num_experts, top_k, renormalise=renormalise is not False)


def _check_groups(raw: RawConfig, routing: Routing) -> None:
    size, rest = divmod(routing.num_experts, routing.num_groups)
    if (
        rest
        or size < routing.group_best
        or not routing.top_k <= size * routing.top_groups <= routing.num_experts
    ):
        raise ConfigError(
            f"{raw.source}: num_experts_per_tok={routing.top_k} of "
            f"n_routed_experts={routing.num_experts} cannot be chosen from "
            f"topk_group={routing.top_groups} of n_group={routing.num_groups} groups"
        )


def _qwen_layers(raw: RawConfig, num_layers: int) -> tuple[bool, ...]:
    step = raw.read_size("decoder_sparse_step", default=1)
    dense = raw.read_list(int, "mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _with_experts(
    spec: ModelSpec,
    routing: Routing,
    inner_size: int,
    names: ExpertNames,
    *,
    layers: tuple[bool, ...] | None = None,
    shared_size: int | None = None,
    shared_gated: bool = False,
    shared_fused: bool = False,
    bias: bool = False,
) -> ModelSpec:
    """Put experts in place of MLPs. layers: whether each layer has experts; all have if None."""
    experts = ExpertsSpec(
        routing,
        (True,) * spec.num_layers if layers is None else layers,
        inner_size,
        names,
        shared_size,
        shared_gated,
        bias,
        shared_fused,
    )
    if not experts.num_layers:
        return spec
    size, mlp_size = spec.hidden_size, spec.intermediate_size
    each = experts.layer_parameters(size) - 3 * size * mlp_size
    counts = replace(
        spec.parameters,
        extra=spec.parameters.extra + experts.num_layers * each,
        idle=experts.num_layers * experts.idle_parameters(size),
    )
    return replace(spec, experts=experts, parameters=counts, matrices=_matrices(spec, experts))


def _matrices(spec: ModelSpec, experts: ExpertsSpec) -> tuple[MatrixShape, ...]:
    """Return the matrices of `spec` with those of experts in place of as many MLPs."""
    found = list(spec.matrices)
    dense = spec.num_layers - experts.num_layers
    networks = [
        (spec.intermediate_size, dense),
        (experts.inner_size, experts.num_layers * experts.routing.num_experts),
        (experts.shared_size or 0, experts.num_layers),
    ]
    for shape in _network(spec, spec.intermediate_size, spec.num_layers):
        found.remove(shape)
    for inner, count in networks:
        if inner and count:
            found += _network(spec, inner, count)
    return tuple(found)


def _network(spec: ModelSpec, inner: int, count: int) -> tuple[MatrixShape, MatrixShape]:
    size = spec.hidden_size
    return MatrixShape(2 * inner, size, count), MatrixShape(size, inner, count)


_MODEL = "quire.compute.models.llama:LlamaModel"

_QWEN_BLOCK = expert_block("mlp.gate", "mlp.experts", PROJECTIONS)
_QWEN2_BLOCK = {
    **_QWEN_BLOCK,
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    SHARED_GATE: "mlp.shared_expert_gate",
}
_MIXTRAL_BLOCK = expert_block(
    "block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")
)
_GRANITE_BLOCK = expert_block(
    "block_sparse_moe.router.layer", "block_sparse_moe.experts", PROJECTIONS
)
_GLM4_BLOCK = {
    **_QWEN_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GPT_OSS_BLOCK = {
    **expert_block("mlp.router", "mlp.experts", PROJECTIONS),
    "post_attention_norm": "post_attention_layernorm",
}
_LFM2_NAMES = replace(
    GGUF_NAMES,
    name="lfm2moe",
    block={
        **GGUF_NAMES.block,
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b.bias": "feed_forward.expert_bias",
        "ffn_gate_exps": "feed_forward.experts.{}.w1",
        "ffn_up_exps": "feed_forward.experts.{}.w3",
        "ffn_down_exps": "feed_forward.experts.{}.w2",
    },
    numbers={**GGUF_NAMES.numbers, "num_dense_layers": "leading_dense_block_count"},
)

_DELTA_BLOCK = {**_QWEN2_BLOCK, **GGUF_BLOCK}

FAMILIES = (
    Family(
        "Mixtral",
        _MODEL,
        "mixtral",
        {"MixtralForCausalLM": read_mixtral},
        GGUFNames("llama", _MIXTRAL_BLOCK, pairs_heads=True, told_by="expert_count"),
    ),
    Family(
        "Qwen2-MoE",
        _MODEL,
        "qwen2_moe",
        {"Qwen2MoeForCausalLM": read_qwen2_moe},
        GGUFNames("qwen2moe", _QWEN2_BLOCK),
    ),
    Family(
        "Qwen3-MoE",
        _MODEL,
        "qwen3_moe",
        {"Qwen3MoeForCausalLM": read_qwen3_moe},
        GGUFNames("qwen3moe", _QWEN_BLOCK),
    ),
    Family(
        "OLMoE", _MODEL, "olmoe", {"OlmoeForCausalLM": read_olmoe}, GGUFNames("olmoe", _QWEN_BLOCK)
    ),
    Family(
        "Phi-3.5-MoE",
        "quire.compute.models.centered:CenteredModel",
        "phimoe",
        {"PhimoeForCausalLM": read_phimoe, "PhiMoEForCausalLM": read_phimoe},
    ),
    Family(
        "Granite 3 with experts",
        _MODEL,
        "granitemoe",
        {"GraniteMoeForCausalLM": read_granite_moe},
        GGUFNames("granitemoe", _GRANITE_BLOCK, pairs_heads=True, numbers=GRANITE_NUMBERS),
    ),
    Family(
        "Granite 4",
        SSD_MODEL,
        "granitemoehybrid",
        {"GraniteMoeHybridForCausalLM": read_granite_4},
        GRANITE_GGUF,
    ),
    Family(
        "GLM-4.5 and later",
        _MODEL,
        "glm4_moe",
        {"Glm4MoeForCausalLM": read_glm4_moe},
        GGUFNames("glm4moe", _GLM4_BLOCK, partly_rotated=True),
    ),
    Family(
        "LFM2 with experts",
        "quire.compute.models.hybrid:LFM2Model",
        "lfm2_moe",
        {"Lfm2MoeForCausalLM": read_lfm2_moe},
        _LFM2_NAMES,
    ),
    Family(
        "Qwen3-Next",
        DELTA_MODEL,
        "qwen3_next",
        {"Qwen3NextForCausalLM": read_qwen3_next},
        delta_gguf("qwen3next", _DELTA_BLOCK),
    ),
    Family(
        "Qwen3.5 with experts, text",
        DELTA_MODEL,
        "qwen3_5_moe_text",
        {"Qwen3_5MoeForCausalLM": read_qwen3_5_moe},
        delta_gguf("qwen35moe", _DELTA_BLOCK),
        QWEN3_5_MOE_TEXT,
    ),
    Family(
        "gpt-oss",
        _MODEL,
        "gpt_oss",
        {"GptOssForCausalLM": read_gpt_oss},
        GGUFNames("gpt-oss", _GPT_OSS_BLOCK),
    ),
)
