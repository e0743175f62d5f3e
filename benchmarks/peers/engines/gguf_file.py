"""The random checkpoint as a GGUF file for llama.cpp, in one of its formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.engines.random_checkpoint import (
    Floats,
    num_experts,
    random_tensors,
    read_config,
)

__all__ = ["write_gguf"]

DENSE, WITH_EXPERTS, GPT_OSS = "qwen3", "qwen3moe", "gpt-oss"

# Names of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ("Standardized tensor names").
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_TENSORS = {
    "model.embed_tokens.weight": "token_embd",
    "model.norm.weight": "output_norm",
    "lm_head.weight": "output",
}
_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_EXPERT = re.compile(r"(.+\.experts)\.\d+(\..+)")


def write_gguf(model: Path, target: Path, weights: str, seed: int) -> Path:
    """`target`, made once, then kept. weights: F16, BF16, Q8_0 or Q4_0, of all matrices, the
    embedding too; norms are float32. There is no vocabulary in it: token ids go in and out."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_suffix(".tmp")
    config = read_config(model)
    architecture = _architecture(config)
    writer = GGUFWriter(staged, architecture)
    _write_facts(writer, config)
    for name, tensor in _stacked(random_tensors(config, seed), num_experts(config)):
        is_router = name.endswith(("mlp.gate.weight", "mlp.router.weight"))
        is_plain = tensor.ndim == 1 or is_router or name.endswith(".bias")
        kind = GGMLQuantizationType.F32 if is_plain else GGMLQuantizationType[weights]
        stored = _gguf_name(name, architecture)
        writer.add_tensor(stored, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    staged.rename(target)
    return target


def _architecture(config: dict[str, Any]) -> str:
    if config.get("model_type") == "gpt_oss":
        return GPT_OSS
    return WITH_EXPERTS if num_experts(config) else DENSE


def _stacked(tensors: Iterable[tuple[str, Floats]], count: int) -> Iterator[tuple[str, Floats]]:
    """Yield tensors, with those of all experts of a layer as one [experts, out, in]. count: number
    of experts."""
    waiting: dict[str, list[Floats]] = {}
    for name, tensor in tensors:
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        own = waiting.setdefault("".join(match.groups()), [])
        own.append(tensor)
        if len(own) == count:
            yield "".join(match.groups()), np.stack(waiting.pop("".join(match.groups())))


def _write_facts(writer: Any, config: dict[str, Any]) -> None:
    from gguf import RopeScalingType

    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if num_experts(config):
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        writer.add_expert_count(num_experts(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(inner)
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if scaling := config.get("rope_scaling"):
        writer.add_rope_scaling_type(RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _gguf_name(name: str, architecture: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return f"{_TENSORS[name]}.weight"
    stored = _LAYER_TENSORS[match[2]]
    if architecture == GPT_OSS and stored == "ffn_norm":
        stored = "post_attention_norm"
    return f"blk.{match[1]}.{stored}.{match[3] or 'weight'}"
