"""Kinds of arguments that the benchmarks take."""

from __future__ import annotations

import argparse

__all__ = ["positive_number"]


def positive_number(text: str) -> int:
    """A whole number from 1 on, as a `type` of argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: not a number from 1 on")
    return int(text)
