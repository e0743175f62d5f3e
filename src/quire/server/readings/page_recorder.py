"""Writes what the page would show to a file that the page plays."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any, TextIO

import msgspec

from quire.errors import ConfigError
from quire.platform.outputs import check_output

logger = logging.getLogger("quire.server")

__all__ = ["PageRecorder"]

MAX_BYTES = 512 * 2**20
"""Size at which a recording ends."""


class PageRecorder:
    """Replaces a file, with a snapshot in its first line and a merge patch in each other line.

    path: "" records nothing. Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        self._file: TextIO | None = None
        self._left = max_bytes
        if not path:
            return
        output = check_output("record_ui", Path(path))
        try:
            self._file = output.path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(
                f"record_ui is {path!r}, which cannot be written ({error.strerror}). Give another "
                "file."
            ) from error

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def add(self, data: dict[str, Any]) -> None:
        """Write a line. A full disk, or `max_bytes`, end the recording and nothing else."""
        if self._file is None:
            return
        line = msgspec.json.encode(data).decode() + "\n"
        self._left -= len(line)
        try:
            if self._left < 0:
                raise OSError("the file has reached its largest size")
            self._file.write(line)
        except OSError as error:
            logger.error("record_ui ends here: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
