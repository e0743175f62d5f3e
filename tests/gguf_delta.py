"""Gated delta rules in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

DELTA = ("qwen35", "qwen35moe", "qwen3next")
DELTA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip

_MTP_NAMES = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}
"""Names under which the converter treats the MTP layer as one behind the last layer."""


def rows_of_delta(
    plain: Mapping[str, torch.Tensor], architecture: str, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as llama.cpp's converter has them: values of Qwen3.5 by their number among
    those of a key, q, k, v and z of Qwen3-Next apart."""
    keys, group = config.linear_num_key_heads, config.linear_num_value_heads
    group, of_key, of_value = (
        group // keys,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    in_turn = torch.arange(keys * group).view(keys, group).t().flatten()
    values = (in_turn[:, None] * of_value + torch.arange(of_value)).flatten()
    qkv = torch.cat((torch.arange(2 * keys * of_key), 2 * keys * of_key + values))
    orders = {
        "in_proj_qkv": qkv, "conv1d": qkv, "in_proj_z": values, "in_proj_a": in_turn,
        "in_proj_b": in_turn, "A_log": in_turn, "dt_bias": in_turn,
    }  # fmt: skip
    last = f"model.layers.{config.num_hidden_layers}."
    for own, tensor in plain.items():
        name = own.replace("mtp.layers.0.", last)
        for part, stored in _MTP_NAMES.items():
            name = name.replace(part, last + stored)
        _, _, part = name.removesuffix(".weight").partition(".linear_attn.")
        rows = -tensor.exp() if part == "A_log" else tensor
        if part == "in_proj_qkvz":
            sizes = (of_key, of_key, group * of_value, group * of_value)
            split = rows.view(keys, sum(sizes), -1).split(sizes, dim=1)
            *parts, z = (each.flatten(0, 1) for each in split)
            yield name.replace("qkvz", "qkv"), torch.cat(parts)
            yield name.replace("qkvz", "z"), z
        elif architecture == "qwen3next" or not part:
            yield name, rows
        elif part == "out_proj":
            yield name, rows[:, values]
        else:
            yield name, rows[orders[part]] if part in orders else rows


def delta_metadata(a: str, config: Any) -> dict[str, Any]:
    if a not in DELTA:
        return {}
    inner = config.linear_num_value_heads * config.linear_value_head_dim
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    third = rotated // 6
    return {
        f"{a}.ssm.conv_kernel": config.linear_conv_kernel_dim,
        f"{a}.ssm.state_size": config.linear_key_head_dim,
        f"{a}.ssm.group_count": config.linear_num_key_heads,
        f"{a}.ssm.time_step_rank": config.linear_num_value_heads,
        f"{a}.ssm.inner_size": inner,
        f"{a}.full_attention_interval": 4,
        f"{a}.rope.dimension_count": rotated,
        f"{a}.rope.dimension_sections": [rotated // 2 - 2 * third, third, third, 0],
        f"{a}.nextn_predict_layers": 1,
        f"{a}.block_count": config.num_hidden_layers + 1,
    }
