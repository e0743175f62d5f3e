"""Flags that name a file to write, against all that the command reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.base.platform.outputs import check_output

__all__ = ["check_output_flag"]


def check_output_flag(
    options: argparse.Namespace,
    flag: str,
    given: str | Path | None,
    *,
    beside: Sequence[str] = (),
    makes_folder: bool = False,
) -> None:
    """Raises ConfigError if the flag's file cannot be written, or if another flag or the model's
    name leads to it. beside, makes_folder: see `check_output`."""
    if not given:
        return
    inputs = [Path(each) for each in _texts(options) if each != str(given)]
    if sum(each == str(given) for each in _texts(options)) > 1:  # named by two flags
        inputs.append(Path(given))
    check_output(flag, Path(given), inputs, beside=beside, makes_folder=makes_folder)


def _texts(options: argparse.Namespace) -> Iterator[str]:
    """Yield what may be a path: the texts that were given, `path` of `name=path` too."""
    for value in vars(options).values():
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Path) or (isinstance(each, str) and each):
                yield str(each)
                _, equals, path = str(each).partition("=")
                if equals and path:
                    yield path
