"""Random weights of a hybrid or latent shape as a GGUF file, for any reader of such files.

`transformers` tells names and shapes, and the tests' writer of GGUF the names and the order of rows
in a file. Matrices are as in the random checkpoint. A file has no vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.engines.random_checkpoint import EXPERT_NUMBERS, SCALE
from tests.gguf_writer import gguf_header, gguf_metadata, gguf_rows

__all__ = ["KINDS", "write_random_gguf"]

KINDS = ("BF16", "Q8_0")
"""Types of matrices. Vectors, routers and convolutions are float32, as in published files."""
ARCHITECTURES = {"lfm2": "lfm2", "qwen3_5_text": "qwen35", "deepseek_v2": "deepseek2"}
"""Names in files, by `model_type`."""
BLOCK = 32
"""Numbers of a block of Q8_0, behind a scale of 16 bits."""
SLICE = 1 << 24
"""Numbers that are packed at a time; a multiple of a block."""


def write_random_gguf(model: Path, target: Path, kind: str, seed: int) -> Path:
    """`target`, made once, then kept. model: folder with a config.json. Raises ValueError for a
    model that has no name here."""
    from transformers import AutoConfig

    if target.exists():
        return target
    config = AutoConfig.from_pretrained(model)
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{model}: model_type {config.model_type!r} is not one of {known}")
    architecture = ARCHITECTURES[config.model_type]
    rows = gguf_rows(dict(_random_weights(config, seed)), architecture, config)
    kinds = {name: _kind_of(name, each, kind) for name, each in rows.items()}
    listed = [
        (name, kinds[name], tuple(each.shape), _num_bytes(kinds[name], each.numel()))
        for name, each in rows.items()
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_suffix(".tmp")
    with staged.open("wb") as file:
        file.write(gguf_header(_metadata(architecture, config, rows), listed))
        for name, each in rows.items():
            for numbers in each.reshape(-1).split(SLICE):
                file.write(_packed(kinds[name], numbers))
            file.write(b"\0" * (-file.tell() % BLOCK))
    staged.rename(target)
    return target


def _random_weights(config: Any, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names as Hugging Face folders have them, and bfloat16; each expert by itself."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    series = _normal((EXPERT_NUMBERS,), generator)
    for name, like in model.state_dict().items():
        start, _, part = name.partition(".experts.")
        if part:
            matrices = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            shape = (like.shape[1] // len(matrices), like.shape[2])
            for expert in range(like.shape[0]):
                for matrix in matrices:
                    stored = f"{start}.experts.{expert}.{matrix}.weight"
                    yield stored, _stretch(series, stored, shape)
        elif like.dim() == 1:
            fill = torch.ones if name.endswith("norm.weight") else torch.zeros
            yield name, fill(like.shape, dtype=torch.bfloat16)
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            yield name, _normal(like.shape, generator)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, SCALE, generator=generator)


def _stretch(series: torch.Tensor, name: str, shape: tuple[int, int]) -> torch.Tensor:
    count = shape[0] * shape[1]
    start = zlib.crc32(name.encode()) % (len(series) - count)
    return series[start : start + count].view(shape)


def _kind_of(name: str, rows: torch.Tensor, kind: str) -> str:
    """kind: the type of matrices. Raises ValueError for rows that are not whole blocks of it."""
    if rows.dim() == 1 or name.endswith(("conv.weight", "conv1d.weight")) or "gate_inp" in name:
        return "F32"
    if kind == "Q8_0" and rows.shape[-1] % BLOCK:
        raise ValueError(f"{name}: rows of {rows.shape[-1]} are not whole blocks of {BLOCK}")
    return kind


def _metadata(architecture: str, config: Any, rows: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the settings that llama.cpp reads, without blocks that guess further tokens."""
    own = {
        "block_count": config.num_hidden_layers,
        "feed_forward_length": rows["blk.0.ffn_gate.weight"].shape[0],
        "nextn_predict_layers": 0,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if architecture == "deepseek2":  # llama.cpp wants the key of every depth but V2-Lite's own
        own["attention.q_lora_rank"] = config.q_lora_rank or 0
    if architecture == "qwen35":
        own["attention.value_length"] = config.head_dim
    found = gguf_metadata(architecture, config) | {"tokenizer.ggml.model": "no_vocab"}
    return found | {f"{architecture}.{key}": value for key, value in own.items()}


def _num_bytes(kind: str, count: int) -> int:
    return {"F32": 4 * count, "BF16": 2 * count, "Q8_0": count // BLOCK * (2 + BLOCK)}[kind]


def _packed(kind: str, numbers: torch.Tensor) -> bytes:
    """One dimension of bfloat16 as a file stores it."""
    if kind == "BF16":
        return numbers.view(torch.int16).numpy().tobytes()
    if kind == "F32":
        return numbers.float().numpy().tobytes()
    blocks = numbers.float().view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks / scales.float().clamp(min=1e-12)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((scales.view(torch.int8), codes), dim=1).numpy().tobytes()
