"""`quire bench throughput`, `quire bench latency` and `quire bench serve`."""

from __future__ import annotations

import argparse
import sys

from quire.entrypoints.cli.flags.bench import (
    add_length_flags,
    add_record_flags,
    bench_command,
    count,
    count_or_zero,
    given_lengths,
)
from quire.entrypoints.cli.flags.engine import add_engine_flags, given_settings
from quire.entrypoints.cli.flags.output import check_output_flag
from quire.entrypoints.cli.modes import bench_serve
from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="{throughput,latency,serve}", required=True)
    throughput = kinds.add_parser("throughput", help="many requests at once: tokens per second")
    add_length_flags(throughput)
    throughput.add_argument("--num-prompts", type=count, default=64, help="requests (64)")
    throughput.add_argument("--repeats", type=count, default=1, help="runs of the workload (1)")
    latency = kinds.add_parser("latency", help="one batch from start to end: seconds")
    _add_latency_flags(latency)
    for kind in (throughput, latency):
        add_record_flags(kind)
        add_engine_flags(kind)
    serve = kinds.add_parser("serve", help="requests to a running server: throughput and latencies")
    bench_serve.add_arguments(serve)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and save the record if asked. ConfigError if the model cannot run so."""
    check_output_flag(options, "--output-json", options.output_json, makes_folder=True)
    if options.kind == "serve":
        return bench_serve.run(options)
    if options.kind == "throughput":
        return _run_throughput(options)
    return _run_latency(options)


def _add_latency_flags(parser: CommandParser) -> None:
    parser.add_argument("--batch-size", type=count, default=8, help="requests at once (8)")
    parser.add_argument("--input-len", type=count, default=32, help="tokens per prompt (32)")
    parser.add_argument("--output-len", type=count, default=128, help="tokens per output (128)")
    parser.add_argument(
        "--num-iters-warmup", type=count_or_zero, default=2, help="batches that do not count (2)"
    )
    parser.add_argument("--num-iters", type=count, default=10, help="batches that count (10)")


def _run_throughput(options: argparse.Namespace) -> int:
    prompts, outputs = given_lengths(options)
    from quire.entrypoints.bench.throughput import (
        ThroughputOptions,
        render_throughput,
        run_throughput,
    )

    wanted = ThroughputOptions(
        prompts=prompts,
        outputs=outputs,
        num_prompts=options.num_prompts,
        max_output_len=options.max_output_len,
        repeats=options.repeats,
        seed=options.bench_seed,
        show_progress=sys.stderr.isatty(),
        with_limits=not options.no_limits,
    )
    record = run_throughput(wanted, given_settings(options), bench_command())
    print(render_throughput(record))
    if options.output_json is not None:
        record.save(options.output_json)
    return 0


def _run_latency(options: argparse.Namespace) -> int:
    from quire.entrypoints.bench.latency import LatencyOptions, render_latency, run_latency

    wanted = LatencyOptions(
        batch_size=options.batch_size,
        input_len=options.input_len,
        output_len=options.output_len,
        num_iters_warmup=options.num_iters_warmup,
        num_iters=options.num_iters,
        seed=options.bench_seed,
        with_limits=not options.no_limits,
    )
    record = run_latency(wanted, given_settings(options), bench_command())
    print(render_latency(record))
    if options.output_json is not None:
        record.save(options.output_json)
    return 0
