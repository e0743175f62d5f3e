"""Settings of latent attention and of DeepSeek's experts in the metadata of GGUF files, by the
names of config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.config.families.deepseek import LATENT_SPLIT
from quire.config.gguf.checkpoint import num_draft_blocks
from quire.config.gguf.header import GGUFHeader

__all__ = ["deepseek_experts", "has_latent", "latent_settings"]

_SIGMOID = 2
"""`expert_gating_func` of experts that are chosen by sigmoids."""

_LOG_SCALE = 0.1
"""`yarn_log_multiplier` is this, times `mscale_all_dim`: YaRN's factor on the logarithm."""

_GROUPS = {256: (8, 4), 160: (8, 3)}
"""Groups of experts, and those that are open to a token, by the number of experts: the values of V3
and R1, and of V2, in files that do not state them. Others have one group."""


def has_latent(header: GGUFHeader, name: str) -> bool:
    """Return whether keys and values are made of one vector for each token."""
    return f"{name}.attention.kv_lora_rank" in header.metadata


def deepseek_experts(header: GGUFHeader, name: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """Settings of the router; blocks that guess further tokens count no layers. read: returns the
    value of a key behind `name`."""
    drafts = num_draft_blocks(header, name)
    found = {
        "num_hidden_layers": read("block_count"),
        "num_nextn_predict_layers": drafts,
        "n_routed_experts": header.integer(f"{name}.expert_count"),
        "n_shared_experts": header.integer(f"{name}.expert_shared_count"),
        "first_k_dense_replace": header.integer(f"{name}.leading_dense_block_count"),
        "routed_scaling_factor": read("expert_weights_scale"),
        "norm_topk_prob": header.flag(f"{name}.expert_weights_norm"),
        "n_group": header.integer(f"{name}.expert_group_count"),
        "topk_group": header.integer(f"{name}.expert_group_used_count"),
    }
    if isinstance(found["num_hidden_layers"], int):
        found["num_hidden_layers"] -= drafts
    return {key: value for key, value in found.items() if value is not None}


def latent_settings(
    header: GGUFHeader, name: str, read: Callable[[str], Any], scaling: dict[str, Any] | None
) -> dict[str, Any]:
    """Sizes of latent attention. Files that state sizes of heads beside those of the cache have the
    matrices to keys and values apart. read: see `deepseek_experts`. scaling: scaling of positions;
    in YaRN cos and sin have no factor, since its two weights are equal in published models."""
    rotary, split = read("rope.dimension_count"), read("attention.key_length_mla") is not None
    query, value = (read(f"attention.{part}_length{'_mla' * split}") for part in ("key", "value"))
    found: dict[str, Any] = {
        "kv_lora_rank": read("attention.kv_lora_rank"),
        "q_lora_rank": read("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value,
        LATENT_SPLIT: split,
    }
    if isinstance(query, int) and isinstance(rotary, int):
        found["qk_nope_head_dim"] = query - rotary
    if scaling is not None and scaling["rope_type"] == "yarn":
        weight = read("rope.scaling.yarn_log_multiplier") or 0.0
        own: dict[str, Any] = {"attention_factor": 1.0, "mscale_all_dim": weight / _LOG_SCALE}
        found["rope_scaling"] = {**scaling, **own}
    if name != "deepseek2":
        return found
    found |= deepseek_experts(header, name, read)
    if "n_group" not in found:
        groups = _GROUPS.get(found.get("n_routed_experts", 0), (1, 1))
        found["n_group"], found["topk_group"] = groups
    is_sigmoid = read("expert_gating_func") == _SIGMOID or any(
        ".exp_probs_b." in tensor for tensor in header.tensors
    )
    if not is_sigmoid:  # V2
        has_groups = (found.get("n_group") or 1) > 1
        method = "group_limited_greedy" if has_groups else "greedy"
        found |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        found["topk_method"] = method
    return found
