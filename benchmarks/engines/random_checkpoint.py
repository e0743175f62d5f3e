"""A checkpoint of the Qwen3 shape, dense or with experts, with random weights, as the converters of
other engines want it.

The numbers are seeded, so every engine computes with the same weights. Norms are one; matrices are
normal with the deviation that published models were started from, and rounded to bfloat16, so
that both 16-bit formats start from the same values.
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
    "random_tensors",
    "read_config",
    "write_checkpoint",
]

SCALE = 0.02
Floats = npt.NDArray[np.float32]


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def count_weights(config: dict[str, Any]) -> tuple[int, int]:
    """Weights in the matrices of all layers, of experts those that a token chooses, and in the tied
    embedding, which is the head."""
    return _count(config, config.get("num_experts_per_tok", 0))


def count_read_weights(config: dict[str, Any], rows: int) -> tuple[int, int]:
    """The same that a step of so many tokens reads, of experts as many as differ if each token
    chooses at random."""
    experts = config.get("num_experts", 0)
    if not experts:
        return count_weights(config)
    missed = (1 - config["num_experts_per_tok"] / experts) ** rows
    return _count(config, experts * (1 - missed))


def _count(config: dict[str, Any], experts: float) -> tuple[int, int]:
    sizes = {name: math.prod(shape) for name, shape in _shapes(config) if len(shape) == 2}
    head = sizes.pop("model.embed_tokens.weight")
    parts = {True: 0, False: 0}
    for name, size in sizes.items():
        parts[".experts." in name] += size
    share = experts / config.get("num_experts", 1)
    return parts[False] + round(parts[True] * share), head


def count_kv_elements(config: dict[str, Any]) -> int:
    """Elements of K and V that a token has in the cache, over all layers."""
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return 2 * heads * config["head_dim"]


def random_tensors(config: dict[str, Any], seed: int) -> Iterator[tuple[str, Floats]]:
    """Hugging Face names of Qwen3 and their tensors, float32 [out, in] or [size]."""
    for name, shape in _shapes(config):
        if len(shape) == 1:
            yield name, np.ones(shape, np.float32)
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
        if experts := config.get("num_experts", 0):
            inner = config["moe_intermediate_size"]
            yield start + "mlp.gate.weight", (experts, hidden)
            networks = [f"{start}mlp.experts.{expert}." for expert in range(experts)]
        for network in networks:
            yield network + "gate_proj.weight", (inner, hidden)
            yield network + "up_proj.weight", (inner, hidden)
            yield network + "down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def _round_to_bfloat16(values: Floats) -> Floats:
    """To the nearest bfloat16, ties to even, still stored as float32."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
