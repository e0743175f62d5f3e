"""Lines that a person types, or that are piped in."""

from __future__ import annotations

import sys
from collections.abc import Iterator

__all__ = ["ask_lines"]

PROMPT = "> "


def ask_lines() -> Iterator[str]:
    """Lines that are not blank, until Ctrl-D or the end of the input. Ctrl-C drops what was typed;
    the second in a row ends too. At a terminal they can be edited and called back."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _allow_editing()
    was_interrupted = False
    while True:
        try:
            line = input(PROMPT if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            print()
            if was_interrupted or not is_terminal:
                return
            was_interrupted = True
            print("Ctrl-C once more, or Ctrl-D, ends.", file=sys.stderr)
            continue
        was_interrupted = False
        if line.strip():
            yield line


def _allow_editing() -> None:
    """Importing it gives `input` arrows and a history, where the system has it."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
