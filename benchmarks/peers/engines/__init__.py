"""The engines that the CPU benchmarks compare: one adapter file each, imported in the process of
its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.peers.engines.engine import (
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
    """bits, kv_bits: bits of a weight and of an element of the KV cache, both without their scales.
    group_bits: bits per weight for the scales and zero points of groups; those of a whole output
    channel are less than a hundredth and left out. head_bits: bits of a weight of the head; None:
    same as in layers."""

    bits: int
    kv_bits: int = 16
    group_bits: float = 0
    head_bits: float | None = None

    def weight_bytes(self, layers: int, head: int) -> float:
        """Return the bytes of this many weights in the layers and in the head."""
        bits = self.bits + self.group_bits
        return (layers * bits + head * (bits if self.head_bits is None else self.head_bits)) / 8


@dataclass(frozen=True, slots=True)
class Adapter:
    """module: has `open_engine(options)`, which loads the engine and raises UnavailableError.
    formats: spelled as the engine's own users know them. restrictable: whether it can be held to an
    instruction set."""

    title: str
    module: str
    formats: Mapping[str, Format]
    restrictable: bool = False


def _int4(group_size: int, group_bits: int, kv_bits: int = 16) -> Format:
    """group_bits: bits of a scale and, if there is one, a zero point. The head keeps 8 bits."""
    return Format(4, kv_bits, group_bits / group_size, head_bits=8)


ENGINES: Mapping[str, Adapter] = {
    "quire": Adapter(
        "quire",
        "benchmarks.peers.engines.quire_engine",
        {
            "bfloat16": Format(16),
            "bfloat16_kv8": Format(16, kv_bits=8),
            "int8": Format(8),
            "int8_kv8": Format(8, kv_bits=8),
            "int8_a16": Format(8),
            "int4": _int4(32, 20),
            "int4_kv8": _int4(32, 20, kv_bits=8),
            "int4_a16": _int4(32, 20),
            "int4-g128-sym": _int4(128, 16),
            "int4-g128-sym_kv8": _int4(128, 16, kv_bits=8),
        },
        restrictable=True,
    ),
    "openvino": Adapter(
        "OpenVINO GenAI",
        "benchmarks.peers.engines.openvino_engine",
        {
            "FP16": Format(16, kv_bits=8),
            "BF16": Format(16, kv_bits=8),
            "INT8": Format(8, kv_bits=8),
            "INT4": _int4(128, 16, kv_bits=8),
        },
        restrictable=True,
    ),
    "llama_cpp": Adapter(
        "llama.cpp",
        "benchmarks.peers.engines.llama_cpp_engine",
        {
            "F16": Format(16),
            "BF16": Format(16),
            "Q8_0": Format(8, group_bits=16 / 32),
            "Q4_0": Format(4, group_bits=16 / 32),
        },
    ),
    "vllm": Adapter("vLLM CPU", "benchmarks.peers.engines.vllm_engine", {"bfloat16": Format(16)}),
}
"""quire's `_kv8` formats have `kv_cache_dtype="int8"`, and `_a16` ones `activation_bits=16`, whose
products are those of floats, though their shares count the limit of integers. Its int4-g128-sym is
OpenVINO's INT4 (openvino_export.py), down to scales of 16 bits and a head of 8. OpenVINO's cache is
8 bits wide unless it is told otherwise (its property KV_CACHE_PRECISION says uint8_t); the others'
is as wide as what they compute with."""
