"""Waiting for a state: long, since others use the machine too, and never for a time to pass."""

from __future__ import annotations

import asyncio
import selectors
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial, wraps
from typing import Any, TypeVar

import httpx

__all__ = [
    "WAIT_S",
    "PatientAsyncClient",
    "PatientClient",
    "VirtualTime",
    "delete",
    "get",
    "in_a_loop",
    "options",
    "post",
    "stream",
    "wait_for",
]

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


class VirtualTime(asyncio.SelectorEventLoop):
    """A loop in which nobody waits: the time that it would sleep is past at once, and no other time
    passes, however slow the machine is."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Clock(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


# The functions of httpx give a busy server 5 seconds, and read all certificates for each call:
# 20 ms that a server on the same processor waits for.
_PATIENT: Mapping[str, Any] = {"timeout": WAIT_S, "verify": ssl.create_default_context()}
delete = partial(httpx.delete, **_PATIENT)
get = partial(httpx.get, **_PATIENT)
post = partial(httpx.post, **_PATIENT)
options = partial(httpx.options, **_PATIENT)
stream = partial(httpx.stream, **_PATIENT)
PatientClient = partial(httpx.Client, **_PATIENT)
PatientAsyncClient = partial(httpx.AsyncClient, **_PATIENT)
