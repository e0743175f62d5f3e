"""A line that says how far loading has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from quire.platform.streams import say

__all__ = ["track"]

T = TypeVar("T")


def track(items: Sequence[T], label: str, *, shown: bool) -> Iterator[T]:
    """Yield the items, writing "label: 50% | 1/2 [3.1s]" to stderr as they are done: one line
    rewritten on a terminal, only the last state elsewhere."""
    started = time.monotonic()
    # pythonw has no standard error.
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]
    for done, item in enumerate(items):
        if shown and is_terminal:
            _write(label, done, len(items), started, "\r")
        yield item
    if shown:
        _write(label, len(items), len(items), started, "\n")


def _write(label: str, done: int, total: int, started: float, end: str) -> None:
    percent = 100 * done // max(total, 1)
    seconds = time.monotonic() - started
    say(f"{label}: {percent:3d}% | {done}/{total} [{seconds:.1f}s]{end}")
