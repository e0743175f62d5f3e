"""A GGUF file gives the logits of the Hugging Face folder with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.gguf_writer import (
    Tensor,
    float_tensor,
    gguf_metadata,
    gguf_name,
    gguf_tensors,
    random_tensor,
    write_gguf,
)
from tests.models.families import Case, random_sequences, write_checkpoint
from tests.models.harness import PagedModel

CASES = (
    Case("llama", "llama"),
    Case("llama-tied-bias", "llama", {"tie_word_embeddings": True, "attention_bias": True}),
    Case("llama-head-dim", "llama", {"head_dim": 16}),
    Case("qwen2", "qwen2"),
    Case("qwen3-tied", "qwen3", {"tie_word_embeddings": True}),
    Case("gemma3", "gemma3_text", {"query_pre_attn_scalar": 16}),
    Case("phi3", "phi3", {"sliding_window": 9, "num_key_value_heads": 1}),
    Case(
        "phi3-longrope",
        "phi3",
        {
            "original_max_position_embeddings": 40,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 4.0],
                "attention_factor": 1.25,
            },
        },
    ),
    Case("glm4", "glm4"),
    Case("olmo2", "olmo2"),
    Case("olmo3", "olmo3"),
    Case(
        "granite",
        "granite",
        {
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.75,
            "attention_multiplier": 0.25,
            "logits_scaling": 4.0,
        },
    ),
    Case("smollm3", "smollm3"),
)


def _architecture(case: Case) -> str:
    """OLMo 3 files are of OLMo 2, with a window."""
    return {"olmo3": "olmo2"}.get(case.model_type, case.model_type.removesuffix("_text"))


def _settings(case: Case, config: Any) -> dict[str, Any]:
    architecture = _architecture(case)
    settings = gguf_metadata(architecture, config)
    ropes = config.rope_parameters
    full = ropes.get("full_attention", ropes)
    if "attention_factor" in full:
        settings[f"{architecture}.rope.scaling.attn_factor"] = float(full["attention_factor"])
    return settings | {f"{architecture}.rope.freq_base": float(full["rope_theta"])}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_are_those_of_the_folder(case: Case, tmp_path: Path) -> None:
    config = write_checkpoint(case, tmp_path).config
    architecture = _architecture(case)
    tensors = gguf_tensors(tmp_path, architecture, config)
    for kind in ("short", "long"):
        if (divisors := config.rope_parameters.get(f"{kind}_factor")) is not None:
            tensors[f"rope_factors_{kind}.weight"] = float_tensor(torch.tensor(divisors))
    file = write_gguf(tmp_path / "model.gguf", _settings(case, config), tensors)
    sequences = random_sequences()
    wanted = PagedModel(tmp_path, "reference", 64).step(sequences)
    found = PagedModel(file, "reference", 64).step(sequences)
    # Gemma's norms are stored with the 1 added, in float32.
    tolerance = 1e-4 if architecture == "gemma3" else 0.0
    for seq in sequences:
        torch.testing.assert_close(found[seq], wanted[seq], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parts", [1, 2])
def test_quantized_matrices_and_parts(parts: int, tmp_path: Path) -> None:
    """Packed matrices equal their numbers in a folder, from one file or several."""
    case = Case("qwen2", "qwen2", {"hidden_size": 64, "intermediate_size": 256})
    config = write_checkpoint(case, tmp_path).config
    plain = load_file(tmp_path / "model.safetensors")
    tensors = gguf_tensors(tmp_path, "qwen2", config)
    kinds = {"down_proj": "Q4_K", "q_proj": "Q4_0", "up_proj": "Q8_0", "embed_tokens": "Q5_1"}
    for seed, name in enumerate(plain):
        kind = kinds.get(name.split(".")[-2])
        if kind is not None and name.endswith("weight"):
            d = 2.0**-14 if kind == "Q4_K" else 2.0**-7
            packed, numbers = random_tensor(kind, tuple(plain[name].shape), seed, d)
            tensors[gguf_name(name, "qwen2")], plain[name] = packed, numbers
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    settings = _settings(case, config) | {"split.count": parts}
    names = list(tensors)
    files = [tmp_path / "model.gguf"]
    if parts > 1:
        files = [tmp_path / f"model-{i:05d}-of-{parts:05d}.gguf" for i in range(1, parts + 1)]
    for index, path in enumerate(files):
        own: dict[str, Tensor] = {name: tensors[name] for name in names[index::parts]}
        write_gguf(path, settings if index == 0 else {"split.no": index}, own)
    sequences = random_sequences()
    found = PagedModel(files[0], "reference", 64)
    assert found.spec.dtype == "float32"  # of most numbers
    wanted = PagedModel(tmp_path, "reference", 64).step(sequences)
    logits = found.step(sequences)
    assert all(torch.equal(logits[seq], wanted[seq]) for seq in sequences)
