"""Flags that several kinds of `quire bench` share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.errors import ConfigError
from quire.entrypoints.cli.parser import CommandParser

if TYPE_CHECKING:
    from quire.entrypoints.bench.lengths import Lengths

__all__ = [
    "add_length_flags",
    "add_record_flags",
    "bench_command",
    "count",
    "count_or_zero",
    "given_lengths",
]

DEFAULT_LENGTH = 128


def add_length_flags(parser: CommandParser) -> None:
    """Add flags for the lengths of prompts and outputs."""
    parser.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt", "alpaca"),
        default="random",
        help="lengths: random has those of --input-len and --output-len, the others have "
        "log-normal ones with the means of the data set (random)",
    )
    text = f"tokens per {{}}, or a range such as 100-1024 ({DEFAULT_LENGTH})"
    for name, thing in (("input", "prompt"), ("output", "output")):
        flags = (f"--{name}-len", f"--random-{name}-len")
        parser.add_argument(*flags, metavar="LENGTH", help=text.format(thing))
    parser.add_argument("--max-output-len", type=count, help="cut longer outputs to this")


def given_lengths(options: argparse.Namespace) -> tuple[Lengths, Lengths]:
    """Distributions of the lengths of prompts and outputs. Raises ConfigError."""
    from quire.entrypoints.bench.lengths import DATASETS, parse_lengths

    given = (options.input_len, options.output_len)
    if options.dataset_name == "random":
        prompts, outputs = (parse_lengths(text or str(DEFAULT_LENGTH)) for text in given)
        return prompts, outputs
    if given != (None, None):
        raise ConfigError(
            f"--dataset-name {options.dataset_name} has lengths of its own. Leave out "
            "--input-len and --output-len, or use --dataset-name random."
        )
    return DATASETS[options.dataset_name]


def add_record_flags(parser: CommandParser, *, draws_seed: bool = False) -> None:
    """Add flags for every kind of benchmark. draws_seed: without the flag each run has a new
    workload."""
    default, shown = (None, "drawn for each run") if draws_seed else (0, "0")
    parser.add_argument(
        "--bench-seed", type=int, default=default, help=f"of the workload ({shown})"
    )
    parser.add_argument("--output-json", type=Path, help="file for the record of the run")
    parser.add_argument(
        "--no-limits", action="store_true", help="do not measure what plain torch reaches here"
    )


def bench_command() -> tuple[str, ...]:
    """The command line, for the record, without keys."""
    shown: list[str] = []
    for argument in sys.argv[1:]:
        name, is_joined, _ = argument.partition("=")
        if name == "--api-key" and is_joined:
            argument = "--api-key=***"
        shown.append("***" if shown and shown[-1] == "--api-key" else argument)
    return ("quire", *shown)


def count(text: str) -> int:
    """An integer of at least 1."""
    value = count_or_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def count_or_zero(text: str) -> int:
    """An integer of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return int(text)
