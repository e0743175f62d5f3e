"""Offline throughput of CPU engines on two fixed workloads of mixed lengths.

    python -m benchmarks.peers.cpu_mixed [--engine quire openvino …] [--python openvino=PATH]…
        [--requests 16 64]

All requests of a workload are queued at once; output tokens divided by the time to the last one,
prompts included in the time. The lengths are data in `workloads/`, log-normal: 16 requests with
1,812 prompt and 2,829 output tokens, of which two are 740 and 982 long; 64 requests with outputs
cut at 256, 7,628 and 7,293 tokens. Token ids are random and fresh in every turn. Engines are those
of `cpu_table.py`; they take turns and are skipped as there. Ratios are of the same turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.engine_runs import (
    BENCHMARKS,
    Group,
    add_engine_arguments,
    hold_to_isa,
    opened_groups,
    record_of,
)
from benchmarks.peers.engine_tables import ratios_by_turn
from benchmarks.peers.engine_turns import MachineLimits, run_turns, warm_up
from benchmarks.peers.engines.process import EngineEndedError
from benchmarks.peers.engines.random_checkpoint import read_config

from quire.entrypoints.bench.lengths import Workload
from quire.entrypoints.bench.machine import LimitProbe
from quire.entrypoints.bench.record import BenchRecord

SIZES = (16, 64)
WARMUP = Workload((32,), (4,))
"""A short request that does not count."""


def main() -> int:
    options = parse_arguments()
    measured = 0
    hold_to_isa(options.isa)
    probe = LimitProbe(options.threads)
    try:
        for size in options.requests:
            work = read_workload(size)
            totals = map(sum, zip(work.prompt_lengths, work.output_lengths, strict=True))
            with TemporaryDirectory() as scratch:
                for group in opened_groups(
                    options,
                    options.work_dir or Path(scratch),
                    max_num_seqs=size,
                    max_model_len=max(totals),
                ):
                    records = measure(group, options, work, probe)
                    measured += len(records)
                    print(render_lines(group, size, records), flush=True)
                    if options.output_folder:
                        for run, record in zip(group.runs, records, strict=True):
                            name = f"{run.name}_{run.weights}_{size}_requests.json"
                            record.save(options.output_folder / name)
    except EngineEndedError as error:
        print(error, file=sys.stderr)
        return 1
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


def measure(
    group: Group, options: argparse.Namespace, work: Workload, probe: LimitProbe
) -> list[BenchRecord]:
    """The whole workload by turns, after one short request that does not count."""
    vocab_size = read_config(options.model)["vocab_size"]
    limits = MachineLimits(probe, group.bits)
    warm_up(group.runs, [WARMUP], vocab_size)
    turns = run_turns(
        group.runs,
        {"mixed": work},
        limits,
        repeats=options.repeats,
        vocab_size=vocab_size,
        seed=options.seed,
    )
    workload = {
        "model": options.model.name,
        "threads": options.threads,
        "isa": options.isa,
        "num_requests": len(work.prompt_lengths),
        "num_prompt_tokens": work.num_prompt_tokens,
        "num_output_tokens": work.num_output_tokens,
        "longest_output": max(work.output_lengths),
    }
    records: list[BenchRecord] = []
    for run in group.runs:
        own = turns[run, "mixed"]
        rates = [turn.timeline.output_rate() for turn in own]
        figures = {"output_tokens_per_s": rates, **limits.figures(own)}
        summary = limits.summary(own)
        records.append(record_of("cpu_mixed", group, run, summary, options.seed, workload, figures))
    return records


def render_lines(group: Group, size: int, records: Sequence[BenchRecord]) -> str:
    lines: list[str] = []
    for run, record in zip(group.runs, records, strict=True):
        rate, read = record.figures["output_tokens_per_s"], record.figures["limit_read_gb_per_s"]
        lines.append(
            f"{run.title}, {size} requests: {rate.median:.1f} output tokens/s ({rate.low:.1f} to "
            f"{rate.high:.1f}); the machine reads {read.median:.0f} GB/s"
        )
    ratios = ratios_by_turn([asdict(record) for record in records], "output_tokens_per_s")
    lines += (
        f"{name}: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        for name, ratio in ratios.items()
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
