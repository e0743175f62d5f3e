"""The engines that the CPU benchmarks compare: one adapter file each, imported in the process of
its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engines.engine import (
    Engine,
    EngineOptions,
    Moment,
    Timeline,
    UnavailableError,
    run_requests,
)

__all__ = [
    "ENGINES",
    "Adapter",
    "Engine",
    "EngineOptions",
    "Format",
    "Moment",
    "Timeline",
    "UnavailableError",
    "run_requests",
]


@dataclass(frozen=True, slots=True)
class Format:
    """Bits of a weight and of an element of the KV cache, both without their scales."""

    bits: int
    kv_bits: int = 16


@dataclass(frozen=True, slots=True)
class Adapter:
    """module: has `open_engine(options)`, which loads the engine and raises UnavailableError.
    formats: spelled as the engine's own users know them. restrictable: whether it can be held to an
    instruction set."""

    title: str
    module: str
    formats: Mapping[str, Format]
    restrictable: bool = False


ENGINES: Mapping[str, Adapter] = {
    "quire": Adapter(
        "quire",
        "engines.quire_engine",
        {
            "bfloat16": Format(16),
            "bfloat16_kv8": Format(16, kv_bits=8),
            "int8": Format(8),
            "int8_kv8": Format(8, kv_bits=8),
            "int4": Format(4),
            "int4_kv8": Format(4, kv_bits=8),
        },
        restrictable=True,
    ),
    "openvino": Adapter(
        "OpenVINO GenAI",
        "engines.openvino_engine",
        {
            "FP16": Format(16, kv_bits=8),
            "BF16": Format(16, kv_bits=8),
            "INT8": Format(8, kv_bits=8),
            "INT4": Format(4, kv_bits=8),
        },
        restrictable=True,
    ),
    "llama_cpp": Adapter(
        "llama.cpp",
        "engines.llama_cpp_engine",
        {"F16": Format(16), "BF16": Format(16), "Q8_0": Format(8), "Q4_0": Format(4)},
    ),
    "vllm": Adapter("vLLM CPU", "engines.vllm_engine", {"bfloat16": Format(16)}),
}
"""quire's `_kv8` formats have `kv_cache_dtype="int8"`. OpenVINO's cache is 8 bits wide unless it is
told otherwise (its property KV_CACHE_PRECISION says uint8_t); the others' is as wide as what they
compute with."""
