"""`quire bench throughput`: all requests at once, offline; tokens per second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import EngineError
from quire.entrypoints.bench.lengths import (
    Lengths,
    Workload,
    describe_lengths,
    draw_workload,
    random_prompts,
)
from quire.entrypoints.bench.machine import Limits, measure_limits
from quire.entrypoints.bench.record import BenchRecord, new_record, spread_of
from quire.entrypoints.llm import LLM
from quire.protocol.sampling_params import SamplingParams

__all__ = ["ThroughputOptions", "render_throughput", "run_throughput"]

WARMUP_PROMPT, WARMUP_OUTPUT = 32, 4
"""Tokens of the request that pays for page faults and thread starts before time counts."""


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """prompts, outputs: distributions of lengths. repeats: same lengths, fresh token ids each, so
    that no repeat finds the prompts of another in the cache."""

    prompts: Lengths
    outputs: Lengths
    num_prompts: int
    max_output_len: int | None
    repeats: int
    seed: int
    show_progress: bool
    with_limits: bool


def run_throughput(
    options: ThroughputOptions, settings: dict[str, Any], command: Sequence[str]
) -> BenchRecord:
    """Measure. settings: settings of the engine, in the form `LLM` takes. Raises ConfigError if it
    cannot start or the lengths do not fit, EngineError if a request failed."""
    with LLM(**settings) as llm:
        resolved = llm.engine.resolved
        workload = draw_workload(
            options.prompts,
            options.outputs,
            options.num_prompts,
            options.seed,
            resolved.settings.max_model_len,
            options.max_output_len,
        )
        _warm_up(llm)
        seconds = [
            _time_once(llm, workload, options.seed + 1 + repeat, options.show_progress)
            for repeat in range(options.repeats)
        ]
    limits = measure_limits(resolved.settings.num_threads) if options.with_limits else None
    tokens_in, tokens_out = workload.num_prompt_tokens, workload.num_output_tokens
    return new_record(
        "throughput",
        command,
        resolved,
        limits,
        seed=options.seed,
        workload={
            "prompts": describe_lengths(options.prompts),
            "outputs": describe_lengths(options.outputs),
            "max_output_len": options.max_output_len,
            "num_prompts": options.num_prompts,
            "num_prompt_tokens": tokens_in,
            "num_output_tokens": tokens_out,
            "longest_prompt": max(workload.prompt_lengths),
            "longest_output": max(workload.output_lengths),
        },
        figures={
            "elapsed_s": spread_of(seconds),
            "requests_per_s": spread_of([options.num_prompts / s for s in seconds]),
            "total_tokens_per_s": spread_of([(tokens_in + tokens_out) / s for s in seconds]),
            "output_tokens_per_s": spread_of([tokens_out / s for s in seconds]),
        },
    )


def render_throughput(record: BenchRecord) -> str:
    """A few lines of text; the first is worded as vLLM's, for scripts that look for it."""
    figures, work = record.figures, record.workload
    output = figures["output_tokens_per_s"]
    lines = [
        f"Throughput: {figures['requests_per_s'].median:.2f} requests/s, "
        f"{figures['total_tokens_per_s'].median:.2f} total tokens/s, "
        f"{output.median:.2f} output tokens/s",
        f"Workload: {work['num_prompts']} requests, {work['num_prompt_tokens']:,} prompt and "
        f"{work['num_output_tokens']:,} output tokens, seed {record.seed}",
        f"Output tokens/s of {len(output.values)} repeats: {output.low:.2f} to {output.high:.2f}",
    ]
    return "\n".join([*lines, *limit_lines(record.limits)])


def limit_lines(limits: Limits | None) -> list[str]:
    """Format the limits of plain torch, to compare a figure with."""
    if limits is None:
        return []
    return [
        f"Machine: reads {limits.read_gb_per_s} GB/s, multiplies {limits.matmul_gflop_per_s} "
        f"GFLOP/s in float32 (torch with {limits.num_threads} threads, in this run)"
    ]


def exact_params(output_length: int) -> SamplingParams:
    """Exactly so many tokens, greedy, no text."""
    return SamplingParams(
        temperature=0.0, max_tokens=output_length, ignore_eos=True, detokenize=False
    )


def generate_exactly(
    llm: LLM, prompts: Sequence[list[int]], lengths: Sequence[int], show_progress: bool
) -> None:
    """Raises EngineError unless every request gave exactly its number of tokens."""
    params = [exact_params(length) for length in lengths]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=show_progress
    )
    for output, length in zip(outputs, lengths, strict=True):
        got = sum(len(sample.token_ids) for sample in output.outputs)
        if output.error is not None or got != length:
            raise EngineError(
                f"Request {output.request_id} of the benchmark gave {got} of {length} tokens "
                f"({output.error or 'no error'}), so its time means nothing. Check the settings."
            )


def _warm_up(llm: LLM) -> None:
    longest = llm.engine.resolved.settings.max_model_len
    length = min(WARMUP_PROMPT, longest - 1)
    prompts = random_prompts([length], llm.engine.spec.vocab_size, seed=0)
    generate_exactly(llm, prompts, [min(WARMUP_OUTPUT, longest - length)], show_progress=False)


def _time_once(llm: LLM, workload: Workload, seed: int, show_progress: bool) -> float:
    prompts = random_prompts(workload.prompt_lengths, llm.engine.spec.vocab_size, seed)
    start = time.perf_counter()
    generate_exactly(llm, prompts, workload.output_lengths, show_progress)
    return time.perf_counter() - start
