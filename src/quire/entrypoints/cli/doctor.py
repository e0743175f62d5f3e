"""`quire doctor` describes this machine, and checks its kernels against their references."""

from __future__ import annotations

import argparse
import json
import sys

from quire.config import env
from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the inputs that are compared (0)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the diagnosis. Status 1 if a kernel disagrees with its reference."""
    from quire.entrypoints.bench.diagnosis import diagnose, render_diagnosis

    env.check_kernels()
    if not options.json:
        waiting = "comparing every kernel with its reference: on a busy machine this takes minutes"
        print(waiting, file=sys.stderr, flush=True)
    diagnosis = diagnose(seed=options.seed)
    print(
        json.dumps(diagnosis.as_json(), indent=2) if options.json else render_diagnosis(diagnosis)
    )
    return 0 if diagnosis.ok else 1
