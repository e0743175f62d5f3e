"""Tiny random checkpoints of every supported family and variant, written by `transformers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.models.family_bases import BASES, VOCAB

LENGTHS = (23, 1, 37, 9)
"""Tokens of the sequences that go through a model together, in blocks of 4."""


@dataclass(frozen=True)
class Case:
    """One variant. extra: config values beyond the family's base. max_positions: the context that
    the engine is started with. lengths: lengths of the sequences to compare. attention:
    implementation that `transformers` computes with."""

    name: str
    model_type: str
    extra: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"
    max_positions: int = 64
    lengths: tuple[int, ...] = LENGTHS
    attention: str = "eager"


def _rope(name: str, rope: dict[str, Any], **more: Any) -> Case:
    return Case(
        f"llama-{name}", "llama", {"rope_parameters": {"rope_theta": 500.0, **rope}}, **more
    )


def _yarn(trained: int, theta: float = 1e4, beta_fast: float = 2.0, **more: Any) -> dict[str, Any]:
    """Rope parameters of a context of `trained` tokens, stretched by 4."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": 4.0,
        "original_max_position_embeddings": trained,
        "beta_fast": beta_fast,
        "beta_slow": 0.5,
        **more,
    }


GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 20,
}
GEMMA4_WHOLE = Case(
    "gemma4-whole",
    "gemma4_text",
    {
        **GEMMA4_EXPERTS,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
)
"""Experts beside all that small models of Gemma 4 have. No published model is like it."""

_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 6.0],
    "original_max_position_embeddings": 40,
}
_DEEPSEEK_YARN = _yarn(16, mscale=0.707, mscale_all_dim=0.707)
GRANITE = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
CASES = (
    Case("llama", "llama"),
    Case("llama-bias", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-tied", "llama", {"tie_word_embeddings": True}),
    Case("llama-sharded", "llama", shard_size="10KB"),
    Case("llama-head-dim", "llama", {"head_dim": 16}),
    Case("llama-mqa", "llama", {"num_key_value_heads": 1}),
    Case("llama-gelu", "llama", {"hidden_act": "gelu"}),
    _rope("linear", {"rope_type": "linear", "factor": 4.0}),
    _rope("dynamic", {"rope_type": "dynamic", "factor": 2.0}),
    _rope(
        "llama3",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    Case(
        "llama-yarn",
        "llama",
        {"head_dim": 32, "rope_parameters": _yarn(48)},
    ),
    _rope(
        "yarn-mscale",
        _yarn(32, theta=500.0, beta_fast=8.0, mscale=1.0, mscale_all_dim=0.5, truncate=False),
    ),
    _rope("longrope-short", _LONGROPE, max_positions=40),
    _rope("longrope-long", _LONGROPE, max_positions=64, lengths=(41, 52)),
    Case("arcee", "arcee"),
    Case(
        "arcee-bias",
        "arcee",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True},
    ),
    Case("seed-oss", "seed_oss"),
    Case(
        "seed-oss-bias",
        "seed_oss",
        {
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
    Case("mistral", "mistral"),
    Case("mistral-window", "mistral", {"sliding_window": 6, "num_hidden_layers": 4}),
    Case("qwen2", "qwen2"),
    Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
    Case(
        "qwen2-mixed",
        "qwen2",
        {
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    Case(
        "qwen2-layer-types",
        "qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    Case("qwen3", "qwen3"),
    Case("qwen3-bias", "qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    Case(
        "gemma2",
        "gemma2",
        {
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    Case(
        "gemma2-uncapped",
        "gemma2",
        {
            "num_hidden_layers": 3,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "silu",
        },
    ),
    Case("gemma3", "gemma3_text", {"query_pre_attn_scalar": 24}),
    Case(
        "gemma3-linear",
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        },
    ),
    Case("lfm2", "lfm2"),
    Case(
        "lfm2-bias",
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
        },
    ),
    Case("lfm2-moe", "lfm2_moe"),
    Case(
        "lfm2-moe-unbiased",
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
    Case("qwen3.5", "qwen3_5_text"),
    Case(
        "qwen3.5-tied",
        "qwen3_5_text",
        {
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    Case("qwen3.5-moe", "qwen3_5_moe_text"),
    Case("qwen3-next", "qwen3_next"),
    Case(
        "qwen3-next-mixed",
        "qwen3_next",
        {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    Case("granite-4", "granitemoehybrid", GRANITE),
    Case(
        "granite-4-rope",
        "granitemoehybrid",
        {
            **GRANITE,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "time_step_limit": [0.3, 0.9],
            "tie_word_embeddings": True,
        },
    ),
    Case(
        "granite-4-moe",
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 5, "intermediate_size": 20},
    ),
    Case("mamba2", "mamba2"),
    Case(
        "mamba2-bias",
        "mamba2",
        {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "tie_word_embeddings": True},
    ),
    Case("opt", "opt"),
    Case("opt-350m", "opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    Case(
        "opt-plain",
        "opt",
        {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
    ),
    Case("gpt2", "gpt2"),
    Case(
        "gpt2-scales",
        "gpt2",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 40,
            "activation_function": "relu",
            "n_layer": 4,
        },
    ),
    Case("gpt-neox", "gpt_neox", {"rotary_pct": 0.5}),
    Case(
        "gpt-neox-in-turn",
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"},
    ),
    Case("mpt", "mpt"),
    Case(
        "mpt-6-heads",
        "mpt",
        {
            "d_model": 48,
            "n_heads": 6,
            "attn_config": {"softmax_scale": 0.3},
            "tie_word_embeddings": False,
        },
    ),
    Case("phi3", "phi3", {"num_key_value_heads": 1}),
    Case(
        "phi3-longrope",
        "phi3",
        {
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 40,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 2.0, 4.0],
            },
        },
        lengths=(41, 52),
    ),
    Case("olmo2", "olmo2"),
    Case("olmo2-bias", "olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    Case("olmo3", "olmo3"),
    Case(
        "olmo3-yarn",
        "olmo3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "full_attention": _yarn(48, theta=500.0),
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    Case("glm", "glm", {"attention_bias": False, "partial_rotary_factor": 0.25}),
    Case("glm4", "glm4"),
    Case("granite", "granite", GRANITE),
    Case(
        "granite-bias",
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Case("cohere", "cohere", {"logit_scale": 2.0}),
    Case("cohere2", "cohere2", {"logit_scale": 2.0, "attention_bias": True}),
    Case("exaone4", "exaone4"),
    Case(
        "exaone4-full",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "head_dim": 16},
    ),
    Case("helium", "helium"),
    Case(
        "helium-bias",
        "helium",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    Case("smollm3", "smollm3"),
    Case(
        "smollm3-window",
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "no_rope_layers": [0, 1, 1, 0],
            "tie_word_embeddings": False,
        },
    ),
    Case("gemma4", "gemma4_text", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    Case(
        "gemma4-31b",
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    Case(
        "gemma4-26b",
        "gemma4_text",
        {
            **GEMMA4_EXPERTS,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    Case("mixtral", "mixtral"),
    Case("mixtral-window", "mixtral", {"sliding_window": 6, "num_experts_per_tok": 3}),
    Case("qwen2-moe", "qwen2_moe"),
    Case(
        "qwen2-moe-mixed",
        "qwen2_moe",
        {
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
        },
    ),
    Case("qwen3-moe", "qwen3_moe", {"norm_topk_prob": True}),
    Case("qwen3-moe-unnormed", "qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True}),
    Case("olmoe", "olmoe"),
    Case("olmoe-normed", "olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    Case("granite-moe", "granitemoe", GRANITE),
    Case("glm4-moe", "glm4_moe", {"routed_scaling_factor": 2.5}),
    Case(
        "glm4-moe-plain",
        "glm4_moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
        },
    ),
    Case("deepseek-v2", "deepseek_v2", {"routed_scaling_factor": 16.0}),
    Case(
        "deepseek-v2-lite",
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
            "n_shared_experts": 2,
            "qk_rope_head_dim": 32,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    Case("deepseek-v3", "deepseek_v3"),
    Case(
        "deepseek-v3-yarn",
        "deepseek_v3",
        {
            "qk_rope_head_dim": 32,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope_parameters": {**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    Case(
        "deepseek-v3-halves",
        "deepseek_v3",
        {"rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
    Case("deepseek-v3-dense", "deepseek_v3", {"first_k_dense_replace": 3, "q_lora_rank": None}),
    Case("deepseek-v32", "deepseek_v32"),
    Case(
        "glm4-moe-lite",
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense", "sparse", "dense"], "v_head_dim": 16},
    ),
    Case("glm-moe-dsa", "glm_moe_dsa"),
    Case("minicpm3", "minicpm3"),
    Case(
        "minicpm3-long",
        "minicpm3",
        {
            "scale_emb": 1.5,
            "tie_word_embeddings": False,
            "v_head_dim": None,
            "rope_parameters": {"rope_theta": 500.0, **_LONGROPE},
        },
        lengths=(41, 52),
    ),
    Case("gpt-oss", "gpt_oss", {"num_experts_per_tok": 3}),
    Case(
        "gpt-oss-default-rope",
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "num_experts_per_tok": 2,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    Case(
        "ministral3",
        "ministral3",
        {
            "head_dim": 32,
            "rope_parameters": _yarn(12, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5),
        },
    ),
    Case("ministral3-window", "ministral3", {"sliding_window": 6}),
    Case("stablelm", "stablelm", {"use_qkv_bias": True}),
    Case(
        "stablelm-side-by-side",
        "stablelm",
        {"use_parallel_residual": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
    ),
    Case("starcoder2", "starcoder2"),
    Case(
        "starcoder2-plain",
        "starcoder2",
        {"sliding_window": None, "use_bias": False, "tie_word_embeddings": False},
    ),
    Case("nemotron", "nemotron"),
    Case(
        "nemotron-bias",
        "nemotron",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "hidden_act": "silu"},
    ),
    Case("falcon-7b", "falcon"),
    Case("falcon-40b", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Case(
        "falcon-11b",
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 48,
            "tie_word_embeddings": False,
        },
    ),
    Case(
        "falcon-rw",
        "falcon",
        {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
        attention="sdpa",  # the other one adds ALiBi twice, in transformers 5.24
    ),
    Case("bloom", "bloom"),
    Case("bloom-6-heads", "bloom", {"hidden_size": 48, "n_head": 6, "tie_word_embeddings": False}),
    Case("phimoe", "phimoe", {"router_jitter_noise": 0.3}),
    Case(
        "phimoe-bias",
        "phimoe",
        {
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": {
                **_LONGROPE,
                "rope_theta": 500.0,
                "short_mscale": 1.2,
                "long_mscale": 1.4,
            },
        },
        max_positions=40,
    ),
    Case("gpt2-unscaled", "gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False}),
)


def write_checkpoint(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a random model of `case` into `folder` and return the `transformers` model.

    All parameters are random, biases and norms too: zeros and ones would hide a forgotten one.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    base = BASES.get(case.model_type, {})
    config = CONFIG_MAPPING[case.model_type](**{**base, **case.extra})
    config._attn_implementation = case.attention
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1.0 if is_factor(name) else noise)
            if name.endswith("A_log"):  # of states that last for some tokens
                parameter.copy_((0.1 + noise.abs() / 4).log())
            if name.endswith("dt_bias"):
                parameter.sub_(0.5)
        for name, buffer in model.named_buffers():
            noise = torch.randn(buffer.shape, generator=generator) * 0.2
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(noise)
            if name.endswith("layer_scalar"):
                buffer.copy_(noise + 1.0)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=case.shard_size)
    return model


def is_factor(name: str) -> bool:
    """Return whether the tensor multiplies what passes it, so that its numbers are around 1."""
    is_norm = ("norm" in name.lower() or ".ln_" in name) and name.endswith("weight")
    return is_norm or name.endswith(("layer_scalar", "router.scale", "per_expert_scale"))


def random_sequences(lengths: tuple[int, ...] = LENGTHS) -> dict[int, list[int]]:
    """Token ids by sequence."""
    generator = torch.Generator().manual_seed(11)
    return {
        seq: torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        for seq, length in enumerate(lengths)
    }
