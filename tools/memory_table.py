"""Write `docs/models-by-memory.md`: the models that run in so much memory, by the plan of an
engine.

python -m tools.memory_table
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.base.platform import CpuFacts, Platform
from quire.config import ModelSpec, read_model_spec
from quire.config.memory.amounts import format_bytes
from quire.config.memory.plan import weight_bytes
from quire.config.resolve import resolve
from quire.config.settings import EngineSettings

PAGE = Path(__file__).parents[1] / "docs" / "models-by-memory.md"
GIB = 2**30
SIZES = (2, 4, 8, 16, 32, 64)
"""Free memory, in GiB."""
FORMATS = {None: "16 bits", "int8": "int8", "int4": "int4"}
LEAST_CONTEXT = 4096
"""Tokens below which a model does not count as running."""
PLATFORM = Platform("cpu", "linux", CpuFacts("x86_64", "", frozenset({"avx2"}), 8, ()), 0, 0)
"""A machine with eight cores. Its memory is what is asked about."""

_QWEN = {"vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
_LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072}
_SMOL = {"vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    }


def _qwen(*sizes: int, tied: bool = False) -> dict[str, Any]:
    named = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    return {**named, **_QWEN, **_sizes(*sizes), "tie_word_embeddings": tied}


def _llama(*sizes: int, tied: bool = False, **more: Any) -> dict[str, Any]:
    values = {**_LLAMA, **_sizes(*sizes), "tie_word_embeddings": tied, **more}
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **values}


MODELS: Mapping[str, dict[str, Any]] = {
    "SmolLM2-135M": _llama(576, 1536, 30, 9, 3, **_SMOL),
    "SmolLM2-360M": _llama(960, 2560, 32, 15, 5, **_SMOL),
    "Qwen3-0.6B": _qwen(1024, 3072, 28, 16, 8, tied=True),
    "Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, tied=True),
    "SmolLM2-1.7B": _llama(2048, 8192, 24, 32, 32, **_SMOL),
    "Qwen3-1.7B": _qwen(2048, 6144, 28, 16, 8, tied=True),
    "Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, tied=True),
    "Qwen3-4B": _qwen(2560, 9728, 36, 32, 8, tied=True),
    "Mistral-7B-v0.3": _llama(
        4096, 14336, 32, 32, 8, vocab_size=32768, max_position_embeddings=32768
    ),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8),
    "Qwen3-8B": _qwen(4096, 12288, 36, 32, 8),
    "Qwen3-14B": _qwen(5120, 17408, 40, 40, 8),
    "Qwen3-30B-A3B": {
        **_qwen(2048, 6144, 48, 32, 4),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Qwen3-32B": _qwen(5120, 25600, 64, 64, 8),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64, 8),
}
"""Published models by name, with the sizes in their config.json."""

_HEAD = """# Models by memory

This page shows what a CPU can run in a given amount of *free* memory. `quire plan MODEL` answers
for your machine, and `quire plan MODEL --memory --accelerators NAME` for another one.

Each cell has the format with the most bits that leaves room for a context of at least 4,096 tokens,
and the longest context of one request in that format. It counts weights, cache, activations and the
process, within the nine tenths of free memory that an engine takes. A GPU needs about the same.

"""

_FOOT = """
`int8` and `int4` are values of `--quantization` for a checkpoint in 16 bits
([how they affect quality](quantization.md#quality)). A GGUF file, or another quantized checkpoint,
takes about as much memory as disk space.

Requests that run at once share the memory that the weights leave. Divide it by the tokens of each
request, times the bytes of a token. `--kv-cache-dtype int8` halves these bytes.

`python -m tools.memory_table` computes this page with the arithmetic of `quire plan`, from the
sizes in the models' config.json.
"""


def render_page() -> str:
    """The whole page."""
    specs = _specs()
    sizes = [
        "## Weights and cache",
        "",
        "| model | parameters | 16 bits | int8 | int4 | K/V of a token, 16 bits |",
        "|---|---|---|---|---|---|",
        *(_row_of_sizes(name, spec) for name, spec in specs.items()),
    ]
    header = " | ".join(f"{size} GiB" for size in SIZES)
    runs = [
        f"| model | {header} |",
        "|---" * (1 + len(SIZES)) + "|",
        *(_row_of_runs(name, spec) for name, spec in specs.items()),
        "",
    ]
    return _HEAD + "\n".join([*runs, *sizes, ""]) + _FOOT


def _specs() -> dict[str, ModelSpec]:
    found: dict[str, ModelSpec] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            (Path(folder) / "config.json").write_text(json.dumps(config))
            found[name] = read_model_spec(Path(folder))
    return found


def _row_of_sizes(name: str, spec: ModelSpec) -> str:
    weights = [format_bytes(weight_bytes(spec, None, quantization)) for quantization in FORMATS]
    count = f"{spec.num_parameters / 1e9:.2f} G"
    per_token = format_bytes(spec.kv_elements * spec.dtype_bytes)
    return f"| {name} | {count} | {' | '.join(weights)} | {per_token} |"


def _row_of_runs(name: str, spec: ModelSpec) -> str:
    return f"| {name} | {' | '.join(_run(spec, size) for size in SIZES)} |"


def _run(spec: ModelSpec, size: int) -> str:
    """Return the widest format that runs in so many GiB, and the longest context in it."""
    for quantization, name in FORMATS.items():
        context = _longest_context(spec, size * GIB, quantization)
        if context >= LEAST_CONTEXT:
            return f"{name}: {context:,}"
    return "–"


def _longest_context(spec: ModelSpec, free: int, quantization: str | None) -> int:
    """Return the longest context of a plan, 0 if there is none."""
    settings = EngineSettings(quantization=quantization, load_format="dummy")
    platform = replace(PLATFORM, memory_bytes=free, free_bytes=free)
    try:
        return resolve(settings, spec, None, platform).settings.max_model_len
    except ConfigError:
        return 0


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
