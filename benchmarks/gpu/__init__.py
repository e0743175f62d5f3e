"""The parts of `python -m benchmarks.gpu`, in the order in which they run.

Importing this loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PARTS", "PartInfo"]


@dataclass(frozen=True, slots=True)
class PartInfo:
    """function: `module:name` of this folder, called with a `Part`. seconds: a limit, at which the
    part ends with what it has found so far; a machine with an H200 should need half of it.
    needs_gpu: it calls kernels in Triton by name; only tests, which repair Triton's interpreter,
    run it dry.
    """

    function: str
    seconds: int
    about: str
    needs_gpu: bool = False


PARTS = {
    "checks": PartInfo("checks:run", 420, "every operation against its reference"),
    "limits": PartInfo("limits:run", 60, "what the GPU can copy and multiply"),
    "laws": PartInfo("laws:run", 300, "batched = alone, graphs, depth, preemption"),
    "qwen3-0.6b": PartInfo("throughput:qwen_small", 240, "256 mixed requests"),
    "qwen3-0.6b-int8-kv": PartInfo("throughput:qwen_small_int8", 240, "the same, int8"),
    "qwen3-0.6b-stream": PartInfo("throughput:qwen_small_stream", 120, "one request"),
    "llama-8b-stream": PartInfo("throughput:llama_stream", 240, "one request"),
    "qwen3-8b": PartInfo("throughput:qwen_large", 420, "400 requests of 128 and 1,024"),
    "host": PartInfo("steps:host_times", 180, "host time of a step, by what it does"),
    "kernels": PartInfo("steps:kernels", 180, "kernels of a step, by the profiler"),
    "decode": PartInfo("attention:decode", 300, "bandwidth of decode attention"),
    "prefill": PartInfo("attention:prefill", 180, "arithmetic of prefill attention"),
    "paging": PartInfo("attention:paging", 180, "paged beside contiguous attention"),
    "decode-tiles": PartInfo(
        "attention_tiles:decode_tiles",
        300,
        "decode attention in other tiles, and mixed",
        needs_gpu=True,
    ),
    "prompt-tiles": PartInfo(
        "attention_tiles:prompt_tiles",
        180,
        "prefill attention in other tiles",
        needs_gpu=True,
    ),
    "linear": PartInfo("linear:run", 420, "matrix products for few rows"),
    "compiled": PartInfo("compiled:run", 240, "torch's compiler beside our kernels"),
    "sampling": PartInfo("sampling:run", 240, "draws, edits, log-probabilities"),
}
