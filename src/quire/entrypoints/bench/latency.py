"""`quire bench latency`: seconds of one batch from start to end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import ConfigError
from quire.entrypoints.bench.lengths import random_prompts
from quire.entrypoints.bench.machine import measure_limits
from quire.entrypoints.bench.record import BenchRecord, new_record, percentile, spread_of
from quire.entrypoints.bench.throughput import generate_exactly, limit_lines
from quire.entrypoints.llm import LLM

__all__ = ["LatencyOptions", "render_latency", "run_latency"]

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """A batch of equal requests, computed `num_iters` times after `num_iters_warmup` that do not
    count, with fresh token ids each."""

    batch_size: int
    input_len: int
    output_len: int
    num_iters_warmup: int
    num_iters: int
    seed: int
    with_limits: bool


def run_latency(
    options: LatencyOptions, settings: dict[str, Any], command: Sequence[str]
) -> BenchRecord:
    """Measure. Raises ConfigError if the engine cannot start or the lengths do not fit."""
    with LLM(**settings) as llm:
        resolved = llm.engine.resolved
        longest = resolved.settings.max_model_len
        if options.input_len + options.output_len > longest:
            raise ConfigError(
                f"--input-len {options.input_len} and --output-len {options.output_len} exceed "
                f"max_model_len={longest} together. Lower one of them."
            )
        seconds = [
            _time_once(llm, options, options.seed + turn)
            for turn in range(options.num_iters_warmup + options.num_iters)
        ][options.num_iters_warmup :]
    limits = measure_limits(resolved.settings.num_threads) if options.with_limits else None
    num_tokens = options.batch_size * options.output_len
    return new_record(
        "latency",
        command,
        resolved,
        limits,
        seed=options.seed,
        workload={
            "batch_size": options.batch_size,
            "input_len": options.input_len,
            "output_len": options.output_len,
            "num_iters_warmup": options.num_iters_warmup,
            "num_iters": options.num_iters,
        },
        figures={
            "latency_s": spread_of(seconds),
            "output_tokens_per_s": spread_of([num_tokens / s for s in seconds]),
        },
    )


def render_latency(record: BenchRecord) -> str:
    """Average and percentiles, worded as vLLM's."""
    values = record.figures["latency_s"].values
    lines = [
        f"Avg latency: {sum(values) / len(values):.4f} seconds",
        *(f"{p}% percentile latency: {percentile(values, p):.4f} seconds" for p in PERCENTILES),
        f"Output tokens/s: {record.figures['output_tokens_per_s'].median:.2f} (median of "
        f"{len(values)} batches of {record.workload['batch_size']})",
    ]
    return "\n".join([*lines, *limit_lines(record.limits)])


def _time_once(llm: LLM, options: LatencyOptions, seed: int) -> float:
    lengths = [options.input_len] * options.batch_size
    prompts = random_prompts(lengths, llm.engine.spec.vocab_size, seed)
    start = time.perf_counter()
    generate_exactly(llm, prompts, [options.output_len] * options.batch_size, show_progress=False)
    return time.perf_counter() - start
