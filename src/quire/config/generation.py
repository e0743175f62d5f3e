"""Reads generation_config.json: what the model's authors suggest for sampling and stopping."""

from __future__ import annotations

from pathlib import Path

from quire.config.hf import read_json
from quire.config.model_spec import GenerationDefaults

__all__ = ["read_generation_defaults"]


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Defaults of a checkpoint folder; all unset if it has no generation_config.json.

    Raises ConfigError if the file is broken or a value has the wrong type.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    raw = read_json(path)
    return GenerationDefaults(
        temperature=raw.read_optional(float, "temperature"),
        top_p=raw.read_optional(float, "top_p"),
        top_k=raw.read_optional(int, "top_k"),
        min_p=raw.read_optional(float, "min_p"),
        repetition_penalty=raw.read_optional(float, "repetition_penalty"),
        max_new_tokens=raw.read_optional(int, "max_new_tokens"),
        eos_token_ids=raw.read_ids("eos_token_id"),
    )
