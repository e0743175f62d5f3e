"""Standard output and error that may be closed, full, or unable to encode a text."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

from quire.base.errors import QuireError

__all__ = ["OutputLostError", "claim_streams", "say"]


class OutputLostError(QuireError):
    """The requested output of a command cannot be written."""


class _Descriptor(io.RawIOBase):
    """Writes to a descriptor, and drops text that cannot be written.

    is_asked_for: the first failure raises OutputLostError, since a user waits for the output;
    BrokenPipeError if its reader has gone."""

    def __init__(self, descriptor: int, *, is_asked_for: bool) -> None:
        self._descriptor = descriptor
        self._is_asked_for = is_asked_for

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            if self._is_asked_for:
                self._is_asked_for = False
                if error.errno == errno.EPIPE:
                    raise
                raise OutputLostError(
                    f"the output cannot be written ({error.strerror}): free some space, or send it "
                    "elsewhere"
                ) from error
        return size


def claim_streams() -> None:
    """Make the standard streams of this process safe to write to: one that is closed becomes the
    null device, what an encoding lacks is escaped, and standard error never raises.

    For programs of quire at their start, not for programs that import it.
    """
    for descriptor in range(3):  # a file that is opened next must not take the place of one
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]  it was closed
        sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        given: Any = getattr(sys, name)
        if given is not None:
            with contextlib.suppress(OSError, ValueError):
                given.flush()
        raw = _Descriptor(descriptor, is_asked_for=name == "stdout")
        is_line_wise = name == "stderr" or raw.isatty()
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=getattr(given, "encoding", None) or "utf-8",
            errors="backslashreplace",
            line_buffering=is_line_wise,
        )
        setattr(sys, name, stream)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def say(text: str) -> None:
    """Write a text to standard error, as it is, and at once. What cannot be written is dropped."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]  pythonw, a closed stream
        return
    with contextlib.suppress(OSError, ValueError):  # an encoding fails with a ValueError
        sys.stderr.write(text)
        sys.stderr.flush()
