"""`quire convert`: a checkpoint as a Hugging Face folder in 16, 8 or 4 bits."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.base.platform.outputs import check_new_folder
from quire.bundled import named_model
from quire.config.hub import resolve_model_folder
from quire.config.quantization import QUANTIZATIONS
from quire.entrypoints.cli.parser import CommandParser

__all__ = ["add_arguments", "run"]


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("model", help="a folder, a GGUF file, or the id of a repository")
    parser.add_argument("out", type=Path, help="the folder to write, which must not exist yet")
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="format of the matrices, stored as compressed-tensors; without it all is bfloat16",
    )
    parser.add_argument(
        "--plain-head",
        action="store_true",
        help="leave the projection to logits plain, and an embedding that it is tied to, for "
        "engines that read no quantized one",
    )
    parser.add_argument(
        "--no-rotation",
        action="store_true",
        help="leave out the rotation of inputs, which costs quality, for engines that read no "
        "transform_config",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the repository")


def run(options: argparse.Namespace) -> int:
    """Convert. ConfigError, and so status 2, if the model cannot be loaded or `out` is there."""
    from quire.engine.convert import convert_model

    check_new_folder(options.out)  # before a repository is fetched
    folder = resolve_model_folder(named_model(options.model), options.revision, None)
    convert_model(
        folder,
        options.out,
        options.quantization,
        plain_head=options.plain_head,
        rotate=not options.no_rotation,
    )
    print(f"wrote {options.out}")
    return 0
