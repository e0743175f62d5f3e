"""`quire check-model`: a model beside `transformers`, in logits."""

from __future__ import annotations

import argparse
import json
import sys

from quire.entrypoints.cli.flags.bench import count
from quire.entrypoints.cli.flags.engine import add_engine_flags, read_settings
from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "--num-tokens", type=count, default=64, help="tokens of the longest sequence (64)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest difference of a logit, relative to the largest one, that counts as equal "
        "(1e-4 in float32, 1e-2 in float16, 5e-2 in bfloat16)",
    )
    parser.add_argument("--token-seed", type=int, default=0, help="seed of the random tokens (0)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_engine_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Print the findings. Status 1 if the logits differ; ConfigError, and so 2, if they cannot be
    compared."""
    from quire.entrypoints.bench.model_check import check_model, render_check

    settings = read_settings(options)
    if not options.json:
        print(f"comparing {settings.model} with transformers", file=sys.stderr, flush=True)
    found = check_model(settings, options.num_tokens, options.tolerance, options.token_seed)
    print(json.dumps(found.as_json(), indent=2) if options.json else render_check(found))
    return 0 if found.ok else 1
