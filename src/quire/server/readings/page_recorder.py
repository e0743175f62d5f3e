"""Writes what the page would show to a file that the page plays."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.base.errors import ConfigError
from quire.base.platform.outputs import check_output

logger = logging.getLogger("quire.server")

__all__ = ["PageRecorder"]

MAX_BYTES = 512 * 2**20
"""Size at which a recording ends."""


class PageRecorder:
    """Replaces a file, with a snapshot in its first line and a merge patch in each other line.

    path: "" records nothing. Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        self._file: BinaryIO | None = None
        self._size, self._max_bytes = 0, max_bytes
        if not path:
            return
        output = self._output = check_output("record_ui", Path(path))
        try:
            self._file = output.path.open("wb")
        except OSError as error:
            raise ConfigError(
                f"record_ui is {path!r}, which cannot be written ({error.strerror}). Give another "
                "file."
            ) from error

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def add(self, data: dict[str, Any]) -> None:
        """Write a line. A full disk, or `max_bytes`, end the recording and nothing else; the lines
        before it stay whole."""
        if self._file is None:
            return
        line = msgspec.json.encode(data) + b"\n"
        try:
            if self._size + len(line) > self._max_bytes:
                raise OSError("the file has reached its largest size")
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            logger.error("record_ui ends here: %s", error)
            self.close()
            if not self._output.is_stream:
                with contextlib.suppress(OSError):
                    os.truncate(self._output.path, self._size)
        else:
            self._size += len(line)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
