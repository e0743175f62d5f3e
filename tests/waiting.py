"""Waiting for a state: long, since others use the machine too, and never for a time to pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, TypeVar

import httpx

__all__ = ["WAIT_S", "PatientClient", "get", "in_a_loop", "options", "post", "stream", "wait_for"]

Found = TypeVar("Found")

WAIT_S = 120.0
"""Time after which a result will not come any more."""


def wait_for(condition: Callable[[], Found], what: str, timeout_s: float = WAIT_S) -> Found:
    """Wait until `condition` gives something true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)
    return found


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine."""

    @wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


# The functions of httpx give a busy server 5 seconds.
get = partial(httpx.get, timeout=WAIT_S)
post = partial(httpx.post, timeout=WAIT_S)
options = partial(httpx.options, timeout=WAIT_S)
stream = partial(httpx.stream, timeout=WAIT_S)
PatientClient = partial(httpx.Client, timeout=WAIT_S)
