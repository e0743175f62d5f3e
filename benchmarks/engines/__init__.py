"""The engines that the CPU benchmarks compare: one adapter file each, imported when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

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
    "open_engine",
    "run_requests",
]


@dataclass(frozen=True, slots=True)
class Adapter:
    """module: has `open_engine(options)`, which raises UnavailableError. bits: of a weight, without
    its scales, by format; formats are spelled as the engine's own users know them."""

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


def open_engine(name: str, options: EngineOptions) -> Engine:
    """Load it. Raises UnavailableError with the reason on one line."""
    make: Callable[[EngineOptions], Engine] = import_module(ENGINES[name].module).open_engine
    return make(options)
