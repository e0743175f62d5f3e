"""Event loop and log of each process of a server."""

from __future__ import annotations

import asyncio
import logging
import sys

from quire.server.readings.short_status import PROBES

__all__ = ["log_to_stderr", "new_loop"]

_QUIET_PATHS = PROBES | {"/metrics"}


def new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def log_to_stderr(level: str = "info") -> None:
    """Log to stderr, in the usual line format of such servers. level: see `ServerSettings`."""
    logging.basicConfig(
        level=level.upper(),
        format="%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    # uvicorn would log its start before the engine is ready; the boot screen has these lines.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    """Return True if a line of uvicorn's access log is worth writing. Successful probes and
    scrapes, which come every few seconds, are not."""
    if not isinstance(record.args, tuple) or len(record.args) != 5:
        return True
    _, _, path, _, status = record.args
    return status != 200 or str(path).partition("?")[0] not in _QUIET_PATHS
