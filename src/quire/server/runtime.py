"""How each process of a server runs: its event loop, and its log."""

from __future__ import annotations

import asyncio
import logging
import sys

__all__ = ["log_to_stderr", "new_loop"]


def new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def log_to_stderr() -> None:
    """The form of line that users of such servers know."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    # Its lines about starting would come before the engine is ready; the boot screen has them.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
