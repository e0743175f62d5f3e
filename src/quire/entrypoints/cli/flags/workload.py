"""Flags of commands that simulate: when requests come, and how long they are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError
from quire.entrypoints.cli.flags.bench import count_or_zero
from quire.entrypoints.cli.parser import CommandParser

if TYPE_CHECKING:
    from quire.entrypoints.simulator.workloads import TraceRequest

__all__ = ["add_workload_flags", "positive", "read_workload"]

DEFAULT_RATE, DEFAULT_SECONDS = 2.0, 600.0


def add_workload_flags(
    parser: CommandParser | argparse._ArgumentGroup, default: str | None = "sharegpt"
) -> None:
    """Add flags for the times and lengths of requests. default: default of the workload."""
    parser.add_argument(
        "--workload",
        default=default,
        metavar="TRACE",
        help="sharegpt, alpaca, chat, translation-80, translation-341, heavy-tailed, or a file: "
        "JSONL, BurstGPT, Azure or Mooncake" + ("" if default is None else f" ({default})"),
    )
    parser.add_argument(
        "--rate", type=positive, help=f"requests per second ({DEFAULT_RATE:g}; a file's own)"
    )
    parser.add_argument(
        "--seconds", type=positive, help=f"length of the trace ({DEFAULT_SECONDS:g}; all of a file)"
    )
    parser.add_argument(
        "--trace-seed", type=count_or_zero, default=0, help="seed of all that is drawn (0)"
    )


def read_workload(options: argparse.Namespace, max_model_len: int) -> list[TraceRequest]:
    """Return the trace that the flags describe: a file, or one that is drawn."""
    from quire.entrypoints.simulator.workloads import TRACE_NAMES, draw_trace, read_trace
    from quire.entrypoints.simulator.workloads.trace import at_rate

    if options.workload in TRACE_NAMES:
        return draw_trace(
            options.workload,
            rate=options.rate or DEFAULT_RATE,
            seconds=options.seconds or DEFAULT_SECONDS,
            seed=options.trace_seed,
            max_model_len=max_model_len,
        )
    path = Path(options.workload)
    if not path.exists():
        raise ConfigError(
            f"Workload {options.workload!r} is no file. Give one, or one of: "
            f"{', '.join(TRACE_NAMES)}."
        )
    trace = read_trace(path)
    if options.seconds is not None:
        trace = [each for each in trace if each.arrival_s <= options.seconds]
    return trace if options.rate is None else at_rate(trace, options.rate)


def positive(text: str) -> float:
    """Read a number above 0, as a `type` of argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
