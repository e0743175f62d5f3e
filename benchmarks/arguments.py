"""Kinds of arguments that the benchmarks take, and the command of a run for its record."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["command_line", "positive_number"]

ROOT = Path(__file__).parents[1]


def command_line() -> list[str]:
    """This run as one types it in the root of the repository: `python -m benchmarks.folder.name …`,
    without a path of this machine for the script."""
    script = Path(sys.argv[0])
    if not script.is_relative_to(ROOT):
        return ["python", *sys.argv]
    name = ".".join(script.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    return ["python", "-m", name, *sys.argv[1:]]


def positive_number(text: str) -> int:
    """A whole number from 1 on, as a `type` of argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: not a number from 1 on")
    return int(text)
