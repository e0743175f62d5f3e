"""A checkpoint of the shape of Qwen3, dense or with experts, or of gpt-oss, with random weights, as
the converters of other engines want it.

The numbers are seeded, so every engine computes with the same weights. Norms are one, biases zero;
matrices are normal with the deviation that published models were started from, and rounded to
bfloat16, so that both 16-bit formats start from the same values. Those of experts are stretches of
one series of numbers, since drawing billions would take minutes.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "count_kv_elements",
    "count_read_weights",
    "count_weights",
    "num_experts",
    "random_tensors",
    "read_config",
    "write_checkpoint",
]

SCALE = 0.02
EXPERT_NUMBERS = 1 << 24
Floats = npt.NDArray[np.float32]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def num_experts(config: dict[str, Any]) -> int:
    """Experts of a layer; 0 for a dense model."""
    return config.get("num_experts", config.get("num_local_experts", 0))


def count_weights(config: dict[str, Any]) -> tuple[int, int]:
    """Weights in the matrices of all layers, of experts those that a token chooses, and in the
    head, which may be the embedding."""
    return _count(config, config.get("num_experts_per_tok", 0))


def count_read_weights(config: dict[str, Any], rows: int) -> tuple[int, int]:
    """The same that a step of so many tokens reads, of experts as many as differ if each token
    chooses at random."""
    experts = num_experts(config)
    if not experts:
        return count_weights(config)
    missed = (1 - config["num_experts_per_tok"] / experts) ** rows
    return _count(config, experts * (1 - missed))


def _count(config: dict[str, Any], experts: float) -> tuple[int, int]:
    sizes = {name: math.prod(shape) for name, shape in _shapes(config) if len(shape) == 2}
    head = sizes.pop("model.embed_tokens.weight")
    head = sizes.pop("lm_head.weight", head)
    parts = {True: 0, False: 0}
    for name, size in sizes.items():
        parts[".experts." in name] += size
    share = experts / (num_experts(config) or 1)
    return parts[False] + round(parts[True] * share), head


def count_kv_elements(config: dict[str, Any]) -> int:
    """Elements of K and V that a token has in the cache, over all layers."""
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return 2 * heads * config["head_dim"]


def random_tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, Floats]]:
    """Hugging Face names and their tensors, float32 [out, in] or [size]; each expert by itself."""
    series = np.random.default_rng(seed).standard_normal(EXPERT_NUMBERS, np.float32) * SCALE
    series = _round_to_bfloat16(series) if num_experts(config) else series[:0]
    for name, shape in _shapes(config):
        if len(shape) == 1:
            is_zero = name.endswith(("bias", "sinks"))
            yield name, (np.zeros if is_zero else np.ones)(shape, np.float32)
        elif ".experts." in name and (spare := len(series) - math.prod(shape)) > 0:
            start = zlib.crc32(name.encode()) % spare
            yield name, series[start : start + math.prod(shape)].reshape(shape)
        else:
            generator = np.random.default_rng((seed, zlib.crc32(name.encode())))
            yield name, _round_to_bfloat16(generator.standard_normal(shape, np.float32) * SCALE)


def write_checkpoint(model: Path, folder: Path, dtype: str, seed: int) -> Path:
    """`folder` with config.json and model.safetensors in `dtype`, a name of torch's; made once,
    then kept."""
    import torch
    from safetensors.torch import save_file

    target = folder / "model.safetensors"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = {**read_config(model), "torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        tensors = {
            name: torch.from_numpy(tensor).to(getattr(torch, dtype))
            for name, tensor in random_tensors(config, seed)
        }
        staged = target.with_suffix(".tmp")
        save_file(tensors, staged, metadata={"format": "pt"})
        staged.rename(target)
    return folder


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    is_gpt_oss = config.get("model_type") == "gpt_oss"
    for name, shape in _all_shapes(config, "mlp.router" if is_gpt_oss else "mlp.gate"):
        if is_gpt_oss and name.endswith("_norm.weight") and "self_attn" in name:
            continue
        yield name, shape
        if is_gpt_oss and len(shape) == 2 and name.startswith("model.layers."):
            yield name.removesuffix("weight") + "bias", shape[:1]
        if is_gpt_oss and name.endswith("o_proj.weight"):
            sinks = name.replace("o_proj.weight", "sinks")
            yield sinks, (config["num_attention_heads"],)


def _all_shapes(config: dict[str, Any], router: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of the Qwen3 shape. router: its name."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        yield start + "input_layernorm.weight", (hidden,)
        yield start + "self_attn.q_proj.weight", (queries, hidden)
        yield start + "self_attn.k_proj.weight", (keys, hidden)
        yield start + "self_attn.v_proj.weight", (keys, hidden)
        yield start + "self_attn.o_proj.weight", (hidden, queries)
        yield start + "self_attn.q_norm.weight", (dim,)
        yield start + "self_attn.k_norm.weight", (dim,)
        yield start + "post_attention_layernorm.weight", (hidden,)
        networks = [start + "mlp."]
        if experts := num_experts(config):
            inner = config.get("moe_intermediate_size", inner)
            yield start + f"{router}.weight", (experts, hidden)
            networks = [f"{start}mlp.experts.{expert}." for expert in range(experts)]
        for network in networks:
            yield network + "gate_proj.weight", (inner, hidden)
            yield network + "up_proj.weight", (inner, hidden)
            yield network + "down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _round_to_bfloat16(values: Floats) -> Floats:
    """To the nearest bfloat16, ties to even, still stored as float32."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
