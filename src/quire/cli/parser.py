"""An argument parser whose errors are one line and name the nearest flag."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

__all__ = ["CommandParser", "print_error"]


class CommandParser(argparse.ArgumentParser):
    """Exits with status 2 and one line on stderr when the arguments are wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        print_error(f"{message} (see {self.prog} --help)")
        sys.exit(2)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  its overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As in the base class, but an unknown flag is an error here, where the flags of this
        command are known and the nearest can be named."""
        parsed, rest = super().parse_known_args(args, namespace)
        for argument in rest:
            if argument.startswith("-"):
                given = argument.partition("=")[0]
                flags = sorted(set(re.findall(r"--[a-z][\w-]*", self.format_help())))
                near = difflib.get_close_matches(given, flags, n=1)
                self.error(
                    f"no such flag: {given}" + (f"; did you mean {near[0]}?" if near else "")
                )
        return parsed, rest


def print_error(message: str) -> None:
    """One line on stderr, in the form that all commands use."""
    print(f"quire: error: {message}", file=sys.stderr)
