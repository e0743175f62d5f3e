"""Sequences that a core computes at the moment, in a file that outlives it.

Whoever replays the requests of a core that died learns here which of them were in the step that
killed it, and suspects those alone.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["InFlightRecord", "read_in_flight"]

MAX_HANDLES = 65_535
_UNKNOWN = -1
_WORD = np.dtype(np.int64).itemsize


def _path(directory: Path, instance: int) -> Path:
    return directory / f"in-flight-{instance}"


class InFlightRecord:
    """The file of one core: int64 [1 + MAX_HANDLES], a count and so many handles. Only the pages
    that are written take memory."""

    def __init__(self, directory: Path, instance: int) -> None:
        descriptor = os.open(_path(directory, instance), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, (1 + MAX_HANDLES) * _WORD)
            self._words = np.frombuffer(mmap.mmap(descriptor, 0), np.int64)
        finally:
            os.close(descriptor)

    def write(self, handles: npt.NDArray[np.int64]) -> None:
        """Replace the record. A reader finds either all of it, or that it is unknown."""
        self._words[0] = _UNKNOWN
        if len(handles) > MAX_HANDLES:
            return
        self._words[1 : 1 + len(handles)] = handles
        self._words[0] = len(handles)

    def clear(self) -> None:
        """Nothing is being computed."""
        self._words[0] = 0


def read_in_flight(directory: Path, instance: int) -> frozenset[int] | None:
    """Return the handles that a dead core was computing; None if its record is incomplete."""
    try:
        words = np.fromfile(_path(directory, instance), np.int64)
    except OSError:
        return None
    if not len(words) or not 0 <= words[0] < len(words):
        return None
    return frozenset(words[1 : 1 + int(words[0])].tolist())
