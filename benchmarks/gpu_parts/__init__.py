"""The parts of benchmarks/gpu.py, in the order in which they run. Importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PARTS", "PartInfo"]


@dataclass(frozen=True, slots=True)
class PartInfo:
    """function: `module:name`, called with a `Part`. seconds: after which the part is ended, with
    what it has found so far; a machine with an H200 should need half of it. needs_gpu: it calls
    kernels in Triton by name; only tests, which repair Triton's interpreter, run it dry."""

    function: str
    seconds: int
    about: str
    needs_gpu: bool = False


PARTS = {
    "checks": PartInfo("gpu_parts.checks:run", 420, "every operation against its reference"),
    "limits": PartInfo("gpu_parts.limits:run", 60, "what the GPU can copy and multiply"),
    "laws": PartInfo("gpu_parts.laws:run", 300, "batched = alone, graphs, depth, preemption"),
    "qwen3-0.6b": PartInfo("gpu_parts.throughput:qwen_small", 240, "256 mixed requests"),
    "qwen3-0.6b-int8-kv": PartInfo("gpu_parts.throughput:qwen_small_int8", 240, "the same, int8"),
    "qwen3-0.6b-stream": PartInfo("gpu_parts.throughput:qwen_small_stream", 120, "one request"),
    "llama-8b-stream": PartInfo("gpu_parts.throughput:llama_stream", 240, "one request"),
    "qwen3-8b": PartInfo("gpu_parts.throughput:qwen_large", 420, "400 requests of 128 and 1,024"),
    "host": PartInfo("gpu_parts.steps:host_times", 180, "host time of a step, by what it does"),
    "kernels": PartInfo("gpu_parts.steps:kernels", 180, "kernels of a step, by the profiler"),
    "decode": PartInfo("gpu_parts.attention:decode", 300, "bandwidth of decode attention"),
    "prefill": PartInfo("gpu_parts.attention:prefill", 180, "arithmetic of prefill attention"),
    "paging": PartInfo("gpu_parts.attention:paging", 180, "paged beside contiguous attention"),
    "decode-tiles": PartInfo(
        "gpu_parts.attention_tiles:decode_tiles",
        300,
        "decode attention in other tiles, and mixed",
        needs_gpu=True,
    ),
    "prompt-tiles": PartInfo(
        "gpu_parts.attention_tiles:prompt_tiles",
        180,
        "prefill attention in other tiles",
        needs_gpu=True,
    ),
    "linear": PartInfo("gpu_parts.linear:run", 420, "matrix products for few rows"),
    "compiled": PartInfo("gpu_parts.compiled:run", 240, "torch's compiler beside our kernels"),
    "sampling": PartInfo("gpu_parts.sampling:run", 240, "draws, edits, log-probabilities"),
}
