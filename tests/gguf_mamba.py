"""GGUF files of Mamba 2 and Granite 4 as llama.cpp's converter writes them; shares no code with
quire's reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["ARCHITECTURES", "mamba_metadata", "mamba_tensors"]

ARCHITECTURES = ("mamba2", "granitehybrid")
_OUTER = {
    "backbone.embeddings": "token_embd", "model.embed_tokens": "token_embd",
    "backbone.norm_f": "output_norm", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
_BLOCK = {
    "norm": "attn_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}  # fmt: skip
_MIXER = {
    "in_proj.weight": "ssm_in.weight", "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias", "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d",
    "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight",
}  # fmt: skip


def mamba_tensors(
    plain: Mapping[str, torch.Tensor], config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a folder by their names in a file."""
    has_experts = bool(getattr(config, "num_local_experts", 0))
    shared = "_shexp" if has_experts else ""
    for name, values in plain.items():
        stem, _, kind = name.rpartition(".")
        if ".layers." not in name:
            yield f"{_OUTER[stem]}.{kind}", values
            continue
        layer, _, part = name.partition(".layers.")[2].partition(".")
        block, stem = f"blk.{layer}", part.removesuffix(".weight")
        mixer, _, own = part.partition(".")
        if mixer in ("mamba", "mixer"):
            yield f"{block}.{_MIXER[own]}", _of_mixer(own, values, config)
        elif stem == "shared_mlp.input_linear":
            gate, up = values.chunk(2)
            yield f"{block}.ffn_gate{shared}.weight", gate
            yield f"{block}.ffn_up{shared}.weight", up
        elif stem == "shared_mlp.output_linear":
            yield f"{block}.ffn_down{shared}.weight", values
        elif stem == "block_sparse_moe.input_linear":
            gate, up = values.chunk(2, dim=1)
            yield f"{block}.ffn_gate_exps.weight", gate
            yield f"{block}.ffn_up_exps.weight", up
        else:
            yield f"{block}.{_BLOCK[stem]}.weight", _paired(stem, values, config)


def _of_mixer(part: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    match part:
        case "A_log":
            return -values.exp().unsqueeze(1)
        case "D":
            return values.unsqueeze(1)
        case "conv1d.weight":
            return values.squeeze(1)
        case "norm.weight":
            return values.view(_read(config, "n_groups"), -1)
        case _:
            return values


def _paired(stem: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of q and k in the order of the rotated pairs."""
    if not stem.endswith(("q_proj", "k_proj")):
        return values
    is_q = stem.endswith("q_proj")
    heads = config.num_attention_heads if is_q else config.num_key_value_heads
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _read(config: Any, name: str) -> Any:
    return getattr(config, name, None) or getattr(config, f"mamba_{name}")


def mamba_metadata(a: str, config: Any) -> dict[str, Any]:
    """Return the settings of a `transformers` config."""
    is_granite = a == "granitehybrid"
    num_heads = config.mamba_n_heads if is_granite else config.num_heads
    values = {
        "general.architecture": a,
        f"{a}.block_count": config.num_hidden_layers,
        f"{a}.context_length": 2**20,
        f"{a}.embedding_length": config.hidden_size,
        f"{a}.feed_forward_length": 0,
        f"{a}.attention.head_count": 0,
        f"{a}.attention.layer_norm_rms_epsilon": float(
            config.rms_norm_eps if is_granite else config.layer_norm_epsilon
        ),
        f"{a}.ssm.conv_kernel": config.mamba_d_conv if is_granite else config.conv_kernel,
        f"{a}.ssm.state_size": config.mamba_d_state if is_granite else config.state_size,
        f"{a}.ssm.inner_size": 2 * config.hidden_size,
        f"{a}.ssm.time_step_rank": num_heads,
        f"{a}.ssm.group_count": _read(config, "n_groups"),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if not is_granite:
        return values
    has_rope, kv_heads = config.position_embedding_type == "rope", config.num_key_value_heads
    if has_rope:
        values[f"{a}.context_length"] = config.max_position_embeddings
    if config.num_local_experts:
        values |= {
            f"{a}.expert_count": config.num_local_experts,
            f"{a}.expert_used_count": config.num_experts_per_tok,
        }
    return values | {
        f"{a}.feed_forward_length": config.intermediate_size,
        f"{a}.attention.head_count": config.num_attention_heads,
        f"{a}.attention.head_count_kv": [
            kv_heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        f"{a}.attention.scale": float(config.attention_multiplier),
        f"{a}.embedding_scale": float(config.embedding_multiplier),
        f"{a}.residual_scale": float(config.residual_multiplier),
        f"{a}.logit_scale": float(config.logits_scaling),
        f"{a}.expert_shared_feed_forward_length": config.shared_intermediate_size,
        f"{a}.rope.scaling.finetuned": has_rope,
    }
