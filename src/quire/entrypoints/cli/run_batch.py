"""`quire run-batch`: a file of requests, answered without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.config.settings import EngineSettings
from quire.config.startup import check_early
from quire.entrypoints.cli.flags.engine import add_engine_flags, given_settings
from quire.entrypoints.cli.flags.output import check_output_flag
from quire.entrypoints.cli.flags.server import add_adapter_flags, read_server_settings
from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests, one in each line"
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="answers, in the same order"
    )
    add_adapter_flags(parser)
    add_engine_flags(parser, server=True)


def run(options: argparse.Namespace) -> int:
    """Status 1 if a line has no good answer. ConfigError if the engine cannot start."""
    from quire.server.batches.runner import BESIDE

    check_output_flag(options, "--output-file", options.output_file, beside=BESIDE)
    settings = EngineSettings.from_options(given_settings(options))
    check_early(settings)
    from quire.server.processes.batch_run import run_batch

    named = read_server_settings(options)
    counts = run_batch(settings, Path(options.input_file), Path(options.output_file), named)
    kept = f", {counts.num_kept} of them by an earlier run" if counts.num_kept else ""
    print(
        f"{counts.num_lines} requests answered{kept}; {counts.num_failed} without a good answer.",
        file=sys.stderr,
    )
    return 1 if counts.num_failed else 0
