"""Latent attention in GGUF files, as llama.cpp's converter writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

LATENT = ("deepseek2", "minicpm3")
LATENT_NAMES = {
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
}  # fmt: skip


def heads_of_latent(plain: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Matrices to keys [heads, rank, nope] and to values [heads, value, rank], as llama.cpp's
    converter has them."""
    found: dict[str, torch.Tensor] = {}
    for name, values in plain.items():
        if ".kv_b_proj." not in name:
            continue
        start = f"blk.{name.split('.')[2]}"
        by_head = values.view(config.num_attention_heads, -1, config.kv_lora_rank)
        found[f"{start}.attn_k_b.weight"] = by_head[:, : config.qk_nope_head_dim].transpose(1, 2)
        found[f"{start}.attn_v_b.weight"] = by_head[:, config.qk_nope_head_dim :]
    return found


def latent_metadata(a: str, config: Any) -> dict[str, Any]:
    if a not in LATENT:
        return {}
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    values = {
        f"{a}.attention.kv_lora_rank": config.kv_lora_rank,
        f"{a}.attention.key_length": query,
        f"{a}.rope.dimension_count": config.qk_rope_head_dim,
    }
    if config.q_lora_rank is not None:
        values[f"{a}.attention.q_lora_rank"] = config.q_lora_rank
    ropes = config.rope_parameters
    if a == "minicpm3":
        values[f"{a}.attention.value_length"] = config.v_head_dim
        if "original_max_position_embeddings" in ropes:
            original = ropes["original_max_position_embeddings"]
            values[f"{a}.rope.scaling.original_context_length"] = original
        return values
    if (weight := ropes.get("mscale_all_dim")) is not None:
        values[f"{a}.rope.scaling.yarn_log_multiplier"] = 0.1 * weight
    is_v2 = config.model_type == "deepseek_v2"
    return values | {
        f"{a}.attention.head_count_kv": 1,
        f"{a}.attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        f"{a}.attention.value_length": config.kv_lora_rank,
        f"{a}.attention.key_length_mla": query,
        f"{a}.attention.value_length_mla": config.v_head_dim,
        f"{a}.expert_gating_func": 1 if is_v2 else 2,
        f"{a}.expert_feed_forward_length": config.moe_intermediate_size,
    }
