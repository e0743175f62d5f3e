"""DeepSeek's lineage: families with multi-head latent attention (arXiv:2405.04434, section 2.1)."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.base.errors import ConfigError
from quire.config.families.experts import with_deepseek_experts
from quire.config.families.family import Family
from quire.config.families.gguf_names import PROJECTIONS, GGUFNames, expert_block
from quire.config.families.llama import read_llama_like
from quire.config.families.mtp import read_mtp_layers
from quire.config.families.shared import FULL, read_num_layers
from quire.config.hf import RawConfig
from quire.config.model_spec import (
    LatentSpec,
    LlamaTraits,
    MatrixShape,
    ModelSpec,
    ParameterCounts,
)
from quire.config.rope import RopeSpec, YarnScaling, yarn_temperature

__all__ = ["FAMILIES", "LATENT_SPLIT"]

LATENT_SPLIT = "latent_split"
"""Key that tells that matrices to keys and values are apart, as GGUF files have them."""

_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V2 = {**_LATENT, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2}
_V3 = {
    **_LATENT,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
_V32 = {**_V3, "max_position_embeddings": 163840, "index_topk": 2048}
_GLM_FLASH = {
    **_V3,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}
_GLM_DSA = {
    **_GLM_FLASH,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
}
_MINICPM3 = {
    "vocab_size": 73448,
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12.0,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
"""Values that these families mean where the file is silent."""


def read_deepseek_v2(raw: RawConfig, dtype: str) -> ModelSpec:
    """DeepSeek V2 and V2-Lite, whose experts are chosen by a softmax."""
    raw = raw.with_defaults(_V2)
    return with_deepseek_experts(raw, _read_latent(raw, dtype), score="softmax")


def read_deepseek_v3(raw: RawConfig, dtype: str) -> ModelSpec:
    """DeepSeek V3 and R1, Kimi K2."""
    raw = raw.with_defaults(_V3)
    return with_deepseek_experts(raw, _read_latent(raw, dtype), score="sigmoid")


def read_deepseek_v32(raw: RawConfig, dtype: str) -> ModelSpec:
    """DeepSeek V3.2."""
    return _read_indexed(raw.with_defaults(_V32), dtype)


def read_glm4_moe_lite(raw: RawConfig, dtype: str) -> ModelSpec:
    """GLM-4.7-Flash."""
    raw = raw.with_defaults(_GLM_FLASH)
    return with_deepseek_experts(raw, _read_latent(raw, dtype), score="sigmoid")


def read_glm_moe_dsa(raw: RawConfig, dtype: str) -> ModelSpec:
    """GLM-5."""
    return _read_indexed(raw.with_defaults(_GLM_DSA), dtype)


def read_minicpm3(raw: RawConfig, dtype: str) -> ModelSpec:
    """MiniCPM3: heads are rotated by halves, and embeddings, sublayers and logits have factors."""
    raw = raw.with_defaults(_MINICPM3)
    hidden, num_layers = raw.read_size("hidden_size"), read_num_layers(raw)
    heads = raw.read_size("num_attention_heads")
    depth, base = (raw.read_optional(float, key) for key in ("scale_depth", "dim_model_base"))
    traits = LlamaTraits(
        embedding_factor=raw.read(float, "scale_emb", default=1.0),
        residual_factor=1.0 if depth is None else depth / math.sqrt(num_layers),
        logit_factor=1.0 if base is None else base / hidden,
    )
    value = raw.read_size("v_head_dim", default=hidden // heads)
    return _read_latent(raw.overridden({"v_head_dim": value}), dtype, traits, tied=True)


def _read_indexed(raw: RawConfig, dtype: str) -> ModelSpec:
    """Read a family with an index, which chooses the tokens to attend to from `index_topk` on
    (DeepSeek-AI 2025, "DeepSeek-V3.2"). Up to so many tokens it would choose all."""
    top_k = raw.read_size("index_topk")
    spec = with_deepseek_experts(raw, _read_latent(raw, dtype), score="sigmoid")
    return replace(spec, index_top_k=top_k, max_context=min(spec.max_context, top_k))


def _read_latent(
    raw: RawConfig, dtype: str, traits: LlamaTraits | None = None, *, tied: bool = False
) -> ModelSpec:
    """traits: traits of the family besides biases and the order of pairs; None for DeepSeek's."""
    latent = LatentSpec(
        rank=raw.read_size("kv_lora_rank"),
        rotary=raw.read_size("qk_rope_head_dim"),
        nope=raw.read_size("qk_nope_head_dim"),
        value=raw.read_size("v_head_dim"),
        query_rank=raw.read_optional(int, "q_lora_rank"),
        split=raw.read(bool, LATENT_SPLIT, default=False),
    )
    if latent.query_rank is not None and latent.query_rank < 1:
        raise ConfigError(f"{raw.source}: q_lora_rank={latent.query_rank} must be at least 1")
    bias = raw.read(bool, "attention_bias", default=False)
    if bias and latent.query_rank is None:
        raise ConfigError(
            f"{raw.source}: attention_bias=True without q_lora_rank is not supported; use a model "
            "without biases"
        )
    if traits is None:
        traits = LlamaTraits(pairs_neighbours=raw.read(bool, "rope_interleave", default=True))
    if raw.read(bool, "mlp_bias", default=False):
        raise raw.unsupported("mlp_bias", value=True, supported=("false",))
    layer_types = (FULL,) * read_num_layers(raw)
    heads = {"num_key_value_heads": 1, "head_dim": latent.rotary}  # those of rope
    plain = RawConfig({**raw.as_dict(), **heads}, raw.source)
    spec = read_llama_like(plain, dtype, traits, layer_types, tied=tied)
    scale = _attention_scale(raw, latent, spec.ropes[0])
    return replace(
        spec,
        traits=replace(traits, qkv_bias=bias, o_bias=bias, attention_scale=scale),
        num_kv_heads=1,
        head_dim=latent.width,
        latent=latent,
        parameters=_parameters(spec, latent, bias=bias),
        matrices=(*_matrices(spec, latent), *spec.matrices[2:]),
        mtp_layers=read_mtp_layers(raw, spec.num_layers),
    )


def _attention_scale(raw: RawConfig, latent: LatentSpec, rope: RopeSpec | None) -> float:
    """Return the factor on q·k. YaRN's temperature multiplies it twice, once for q and once for k,
    by `mscale_all_dim`; cos and sin have only what is left of `mscale` (`read_ropes`)."""
    section = raw.section("rope_parameters") or raw.section("rope_scaling")
    if section is None or rope is None or not isinstance(rope.scaling, YarnScaling):
        return latent.query**-0.5
    weight = section.read(float, "mscale_all_dim", default=0.0)
    return latent.query**-0.5 * yarn_temperature(rope.scaling.factor, weight) ** 2


def _matrices(spec: ModelSpec, latent: LatentSpec) -> tuple[MatrixShape, ...]:
    """Return the matrices of attention that a format may hold: the one from the latent vector keeps
    the model's dtype."""
    hidden, count = spec.hidden_size, spec.num_layers
    queries = spec.num_heads * latent.query
    output = MatrixShape(hidden, spec.num_heads * latent.value, count)
    if latent.query_rank is None:
        return MatrixShape(queries + latent.width, hidden, count), output
    down = MatrixShape(latent.query_rank + latent.width, hidden, count)
    return down, MatrixShape(queries, latent.query_rank, count), output


def _parameters(spec: ModelSpec, latent: LatentSpec, *, bias: bool) -> ParameterCounts:
    """Return the counts of `spec`, which was read with heads of keys and values and without biases,
    with those of latent attention."""
    hidden, heads = spec.hidden_size, spec.num_heads
    plain = hidden * latent.rotary * (2 * heads + 2)
    own = sum(each.outputs * each.inputs for each in _matrices(spec, latent))
    own += heads * (latent.nope + latent.value) * latent.rank + latent.rank
    own += latent.query_rank or 0
    own += bias * ((latent.query_rank or 0) + latent.width + hidden)
    return replace(spec.parameters, layer=spec.parameters.layer - plain + own)


_MODEL = "quire.compute.models.llama:LlamaModel"

_LATENT_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DEEPSEEK_BLOCK = {
    **expert_block("mlp.gate", "mlp.experts", PROJECTIONS),
    **_LATENT_BLOCK,
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}

FAMILIES = (
    Family(
        "DeepSeek V2, V2-Lite",
        _MODEL,
        "deepseek_v2",
        {"DeepseekV2ForCausalLM": read_deepseek_v2},
    ),
    Family(
        "DeepSeek V3, R1, Kimi K2",
        _MODEL,
        "deepseek_v3",
        {"DeepseekV3ForCausalLM": read_deepseek_v3},
        GGUFNames(
            "deepseek2",
            _DEEPSEEK_BLOCK,
            partly_rotated=True,
            ropes=("scaling.yarn_log_multiplier",),
        ),
    ),
    Family(
        "DeepSeek V3.2, short contexts",
        _MODEL,
        "deepseek_v32",
        {"DeepseekV32ForCausalLM": read_deepseek_v32},
    ),
    Family(
        "GLM-4.7-Flash",
        _MODEL,
        "glm4_moe_lite",
        {"Glm4MoeLiteForCausalLM": read_glm4_moe_lite},
    ),
    Family(
        "GLM-5, short contexts",
        _MODEL,
        "glm_moe_dsa",
        {"GlmMoeDsaForCausalLM": read_glm_moe_dsa},
    ),
    Family(
        "MiniCPM3",
        _MODEL,
        "minicpm3",
        {"MiniCPM3ForCausalLM": read_minicpm3},
        GGUFNames("minicpm3", _LATENT_BLOCK, partly_rotated=True),
    ),
)
