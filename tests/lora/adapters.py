"""Writes PEFT's folders of random adapters, and base models with an adapter merged in."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TRANSPOSED = re.compile(r"\b(c_attn|c_proj|c_fc)\b")
"""GPT-2's Conv1D: stored [inputs, outputs]."""

CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny/base",
    "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "lora_dropout": 0.0, "modules_to_save": None, "use_dora": False, "use_rslora": False,
    "megatron_core": "megatron.core", "loftq_config": {}, "qalora_group_size": 16,
}  # fmt: skip


def shape_of(base: Path, module: str) -> tuple[int, int]:
    """Outputs and inputs of a module."""
    weight = load_file(base / "model.safetensors")[f"{module}.weight"]
    outputs, inputs = weight.shape
    return (inputs, outputs) if TRANSPOSED.search(module) else (outputs, inputs)


def modules_of(base: Path, names: Sequence[str]) -> list[str]:
    """All modules of the base model whose names end so."""
    found = [name.removesuffix(".weight") for name in load_file(base / "model.safetensors")]
    return sorted(name for name in found if name.rpartition(".")[2] in names)


def write_adapter(
    folder: Path,
    base: Path,
    names: Sequence[str],
    *,
    rank: int = 4,
    seed: int = 0,
    strength: float = 0.3,
    **config: Any,
) -> Path:
    """A folder as PEFT saves it, that changes all modules whose names end with one of `names`."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    ranks = config.get("rank_pattern", {})
    for module in modules_of(base, names):
        outputs, inputs = shape_of(base, module)
        its = next((r for key, r in ranks.items() if re.search(rf"(^|\.){key}$", module)), rank)
        a = torch.randn(its, inputs, generator=generator) * strength
        b = torch.randn(outputs, its, generator=generator) * strength
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {"r": rank, "lora_alpha": 8, "target_modules": list(names), **CONFIG, **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def merge(folder: Path, base: Path, adapter: Path, scales: Mapping[str, float]) -> Path:
    """The base model with s B A added to its weights. scales: s by a name that ends a module."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    matrices = load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        scale = next(s for end, s in scales.items() if module.endswith(end))
        delta = scale * (matrices[name.replace("lora_A", "lora_B")] @ a)
        weights[f"{module}.weight"] += delta.t() if TRANSPOSED.search(module) else delta
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
