"""Offline throughput of CPU engines on two fixed workloads of mixed lengths.

    python benchmarks/cpu_mixed.py [--engine quire openvino …] [--requests 16 64]

All requests of a workload are queued at once; output tokens divided by the time to the last one,
prompts included in the time. The lengths are data in `workloads/`, log-normal: 16 requests with
1,812 prompt and 2,829 output tokens, of which two are 740 and 982 long; 64 requests with outputs
cut at 256, 7,628 and 7,293 tokens. Token ids are random and fresh in every repeat, in which the
machine's limits are measured too. Engines are those of `cpu_table.py`, and skipped as there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine_runs import (
    BENCHMARKS,
    LimitTurns,
    Run,
    add_engine_arguments,
    opened_engines,
    record_of,
)
from engines import ENGINES, run_requests
from engines.random_checkpoint import read_config

from quire.bench.lengths import Workload, random_prompts
from quire.bench.record import BenchRecord

SIZES = (16, 64)
WARMUP_LENGTHS = (32, 4)
"""Tokens of the prompt and the output of a request that does not count."""


def main() -> int:
    options = parse_arguments()
    measured = 0
    for size in options.requests:
        work = read_workload(size)
        totals = map(sum, zip(work.prompt_lengths, work.output_lengths, strict=True))
        with TemporaryDirectory() as scratch:
            for run in opened_engines(
                options,
                options.work_dir or Path(scratch),
                max_num_seqs=size,
                max_model_len=max(totals),
            ):
                record = measure(run, options, work)
                measured += 1
                print(render_line(run, size, record), flush=True)
                if options.output_folder:
                    name = f"{run.name}_{run.weights}_{size}_requests.json"
                    record.save(options.output_folder / name)
    return 0 if measured else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--requests", nargs="+", type=int, choices=SIZES, default=SIZES)
    return parser.parse_args()


def read_workload(size: int) -> Workload:
    """The fixed lengths of `size` requests."""
    path = BENCHMARKS / "workloads" / f"mixed_{size}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Workload(tuple(found["prompt_lengths"]), tuple(found["output_lengths"]))


def measure(run: Run, options: argparse.Namespace, work: Workload) -> BenchRecord:
    """Repeats of the whole workload, after one short request that does not count."""
    vocab_size = read_config(options.model)["vocab_size"]
    limits = LimitTurns(options.threads)
    warmup_prompt, warmup_output = WARMUP_LENGTHS
    run_requests(run.engine, random_prompts([warmup_prompt], vocab_size, 0), [warmup_output])
    rates: list[float] = []
    for repeat in range(options.repeats):
        limits.measure()
        prompts = random_prompts(work.prompt_lengths, vocab_size, options.seed + 1 + repeat)
        rates.append(run_requests(run.engine, prompts, work.output_lengths).output_rate())
    workload = {
        "model": options.model.name,
        "threads": options.threads,
        "num_requests": len(work.prompt_lengths),
        "num_prompt_tokens": work.num_prompt_tokens,
        "num_output_tokens": work.num_output_tokens,
        "longest_output": max(work.output_lengths),
    }
    figures = {"output_tokens_per_s": rates}
    return record_of("cpu_mixed", run, limits, options.seed, workload, figures)


def render_line(run: Run, size: int, record: BenchRecord) -> str:
    rate, limits = record.figures["output_tokens_per_s"], record.limits
    title = f"{ENGINES[run.name].title}, {run.weights}, {size} requests"
    text = f"{title}: {rate.median:.1f} output tokens/s ({rate.low:.1f} to {rate.high:.1f})"
    if limits is None:
        return text
    return (
        f"{text}; the machine reads {limits.read_gb_per_s:.0f} GB/s and multiplies "
        f"{limits.matmul_gflop_per_s:.0f} GFLOP/s in float32"
    )


if __name__ == "__main__":
    sys.exit(main())
