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
    "Moment",
    "Timeline",
    "UnavailableError",
    "run_requests",
]


@dataclass(frozen=True, slots=True)
class Adapter:
    """module: has `open_engine(options)`, which loads the engine and raises UnavailableError. bits:
    of a weight, without its scales, by format; formats are spelled as the engine's own users know
    them."""

    title: str
    module: str
    bits: Mapping[str, int]


ENGINES: Mapping[str, Adapter] = {
    "quire": Adapter("quire", "engines.quire_engine", {"bfloat16": 16, "int8": 8, "int4": 4}),
    "openvino": Adapter(
        "OpenVINO GenAI", "engines.openvino_engine", {"FP16": 16, "BF16": 16, "INT8": 8, "INT4": 4}
    ),
    "llama_cpp": Adapter(
        "llama.cpp",
        "engines.llama_cpp_engine",
        {"F16": 16, "BF16": 16, "Q8_0": 8, "Q4_0": 4},
    ),
    "vllm": Adapter("vLLM CPU", "engines.vllm_engine", {"bfloat16": 16}),
}
