"""Records lengths and times of requests in a file that `quire simulate` and `quire plan` read."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from pathlib import Path
from typing import TextIO

from quire.base.errors import ConfigError
from quire.base.platform.outputs import check_output
from quire.server.readings.timeline import Timeline

logger = logging.getLogger("quire.server")

__all__ = ["TraceRecorder"]


class TraceRecorder:
    """Adds one line of JSON for each answered prompt: its arrival in seconds since 1970, its
    length, and the average length of its n answers. No text, token or name is written. Several
    processes may write to one file.

    path: "" records nothing. Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._file: TextIO | None = None
        if not path:
            return
        output = check_output("record_trace", Path(path))
        # A pipe without a reader fails at once, and a slow one ends the trace, not the server.
        flags = os.O_WRONLY | (os.O_NONBLOCK if output.is_stream else os.O_APPEND | os.O_CREAT)
        try:
            self._file = open(  # noqa: SIM115  kept open
                os.open(output.path, flags, 0o666), "a", encoding="utf-8", buffering=1
            )
        except OSError as error:
            raise ConfigError(
                f"record_trace is {path!r}, which cannot be written "
                f"({'nobody reads the pipe' if error.errno == errno.ENXIO else error.strerror}). "
                "Give another file."
            ) from error

    def record(self, timeline: Timeline, prompt_tokens: int, output_tokens: int, n: int) -> None:
        """Record a prompt whose samples have ended; one without any output is left out."""
        if self._file is None or not output_tokens:
            return
        line = {
            "arrival_s": round(timeline.arrived_at, 6),
            "prompt_tokens": prompt_tokens,
            "output_tokens": -(-output_tokens // n),
        }
        try:
            self._file.write(json.dumps({**line, "n": n} if n > 1 else line) + "\n")
        except OSError as error:
            logger.error("record_trace ends here: %s", error)
            with contextlib.suppress(OSError):
                self.close()
            self._file = None

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
