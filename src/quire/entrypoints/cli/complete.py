"""`quire complete`: text continued by a running server, or by an engine in this process."""

from __future__ import annotations

import argparse
import sys

from quire.base.errors import QuireError
from quire.entrypoints.cli.flags.source import add_source_flags, open_source
from quire.entrypoints.cli.parser import CommandParser, print_error
from quire.entrypoints.cli.texts.dialogue import ask_lines, print_answer

__all__ = ["add_arguments", "run"]

DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="complete this one text and end")
    add_source_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Status 1 if the one text could not be completed. KeyboardInterrupt if it was cut."""
    with open_source(options) as (source, given):
        sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **given}
        if options.quick is not None:
            if print_answer(source.complete(options.quick, sampling)).is_cut:
                raise KeyboardInterrupt
            return 0
        if sys.stdin.isatty():
            print(f"{source.model}. Type a text to be continued; Ctrl-D ends.", file=sys.stderr)
        for prompt in ask_lines():
            try:
                print_answer(source.complete(prompt, sampling))
            except QuireError as error:
                print_error(str(error))
    return 0
