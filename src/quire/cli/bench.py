"""`quire bench throughput` and `quire bench latency`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.cli.engine_flags import add_engine_flags, given_settings
from quire.cli.parser import CommandParser
from quire.errors import ConfigError

__all__ = ["add_arguments", "run"]

DEFAULT_LENGTH = 128


def add_arguments(parser: CommandParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="kind", required=True)
    throughput = kinds.add_parser("throughput", help="many requests at once: tokens per second")
    _add_throughput_flags(throughput)
    latency = kinds.add_parser("latency", help="one batch from start to end: seconds")
    _add_latency_flags(latency)
    for kind in (throughput, latency):
        kind.add_argument("--bench-seed", type=int, default=0, help="of the workload (0)")
        kind.add_argument("--output-json", type=Path, help="file for the record of the run")
        kind.add_argument(
            "--no-limits", action="store_true", help="do not measure what plain torch reaches here"
        )
        add_engine_flags(kind)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and save the record if asked. ConfigError if the model cannot run so."""
    if options.kind == "throughput":
        return _run_throughput(options)
    return _run_latency(options)


def _add_throughput_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt", "alpaca"),
        default="random",
        help="lengths: random has those of --input-len and --output-len, the others have "
        "log-normal ones with the means of the data set (random)",
    )
    text = "tokens per {}, or a range such as 100-1024 ({})"
    parser.add_argument("--input-len", help=text.format("prompt", DEFAULT_LENGTH))
    parser.add_argument("--output-len", help=text.format("output", DEFAULT_LENGTH))
    parser.add_argument("--max-output-len", type=_count, help="cut longer outputs to this")
    parser.add_argument("--num-prompts", type=_count, default=64, help="requests (64)")
    parser.add_argument("--repeats", type=_count, default=1, help="runs of the workload (1)")


def _add_latency_flags(parser: CommandParser) -> None:
    parser.add_argument("--batch-size", type=_count, default=8, help="requests at once (8)")
    parser.add_argument("--input-len", type=_count, default=32, help="tokens per prompt (32)")
    parser.add_argument("--output-len", type=_count, default=128, help="tokens per output (128)")
    parser.add_argument(
        "--num-iters-warmup", type=_count_or_zero, default=2, help="batches that do not count (2)"
    )
    parser.add_argument("--num-iters", type=_count, default=10, help="batches that count (10)")


def _run_throughput(options: argparse.Namespace) -> int:
    from quire.bench.lengths import DATASETS, parse_lengths
    from quire.bench.throughput import ThroughputOptions, render_throughput, run_throughput

    if options.dataset_name == "random":
        prompts = parse_lengths(options.input_len or str(DEFAULT_LENGTH))
        outputs = parse_lengths(options.output_len or str(DEFAULT_LENGTH))
    else:
        if options.input_len is not None or options.output_len is not None:
            raise ConfigError(
                f"--dataset-name {options.dataset_name} has lengths of its own. Leave out "
                "--input-len and --output-len, or use --dataset-name random."
            )
        prompts, outputs = DATASETS[options.dataset_name]
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
    record = run_throughput(wanted, given_settings(options), _command())
    print(render_throughput(record))
    if options.output_json is not None:
        record.save(options.output_json)
    return 0


def _run_latency(options: argparse.Namespace) -> int:
    from quire.bench.latency import LatencyOptions, render_latency, run_latency

    wanted = LatencyOptions(
        batch_size=options.batch_size,
        input_len=options.input_len,
        output_len=options.output_len,
        num_iters_warmup=options.num_iters_warmup,
        num_iters=options.num_iters,
        seed=options.bench_seed,
        with_limits=not options.no_limits,
    )
    record = run_latency(wanted, given_settings(options), _command())
    print(render_latency(record))
    if options.output_json is not None:
        record.save(options.output_json)
    return 0


def _command() -> tuple[str, ...]:
    return ("quire", *sys.argv[1:])


def _count(text: str) -> int:
    value = _count_or_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _count_or_zero(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)
