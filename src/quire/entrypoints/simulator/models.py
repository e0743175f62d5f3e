"""Models of the papers by name, from their published sizes; any folder gives a spec as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quire.base.errors import ConfigError
from quire.config import ModelSpec, RawConfig, read_model_spec
from quire.config.families.gpt import read_opt
from quire.config.families.llama import read_llama

__all__ = ["MODEL_NAMES", "model_spec"]

# Zhang et al. 2022 (arXiv:2205.01068), table 1; OPT-175B has the sizes of GPT-3.
_OPT: Mapping[str, tuple[int, int, int]] = {
    "opt-13b": (40, 40, 5120),
    "opt-66b": (64, 72, 9216),
    "opt-175b": (96, 96, 12288),
}
"""Layers, heads and width of each."""

# Touvron et al. 2023 (arXiv:2302.13971), table 2; Grattafiori et al. 2024 (arXiv:2407.21783),
# table 3.
_LLAMA: Mapping[str, tuple[int, int, int, int, int, int, int]] = {
    "llama-13b": (40, 40, 40, 5120, 13824, 32000, 2048),
    "llama-3.1-8b": (32, 32, 8, 4096, 14336, 128256, 131072),
}
"""Layers, heads, kv heads, width, inner width, vocabulary and context of each."""

MODEL_NAMES = (*_OPT, *_LLAMA)


def model_spec(name: str) -> ModelSpec:
    """Return a model of `MODEL_NAMES`, in 16 bits, or that of a folder with a config.json.
    ConfigError if there is neither."""
    if name in _OPT:
        return replace(_opt(name), architecture=name)
    if name in _LLAMA:
        return replace(_llama(name), architecture=name)
    folder = Path(name)
    if folder.exists():
        return read_model_spec(folder)
    raise ConfigError(
        f"Model {name!r} is no folder and not known to the simulator. Give a folder, or one of: "
        f"{', '.join(MODEL_NAMES)}."
    )


def _opt(name: str) -> ModelSpec:
    layers, heads, hidden = _OPT[name]
    raw = RawConfig(
        {
            "hidden_size": hidden,
            "ffn_dim": 4 * hidden,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        },
        name,
    )
    return read_opt(raw, "float16")


def _llama(name: str) -> ModelSpec:
    layers, heads, kv_heads, hidden, inner, vocab, context = _LLAMA[name]
    raw = RawConfig(
        {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers,
            "vocab_size": vocab,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        name,
    )
    return read_llama(raw, "float16")
