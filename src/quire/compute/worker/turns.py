"""Steps and the encoder of images take turns on the cores that both need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["Turns"]

SHARE = 0.7
"""Time between two steps for an encoder, as a part of the first step's. A stream's gap grows by it;
the encoder works for 0.7 / 1.7 of the time."""

T = TypeVar("T")


class Turns:
    """Time for an encoder between steps. Its threads give way to all others, so a step has the
    cores while it computes; then the encoder has them for a part of the time that the step took.
    So a stream's gap grows by that part, and the encoder always advances. Side by side, the two
    would wait for each other's threads and evict each other's caches.

    One thread computes steps, and one encodes at a time.
    """

    def __init__(self, share: float = SHARE) -> None:
        """share: time of the encoder after a step, as a part of the step's; 0 where the two need
        different cores."""
        self._share = share
        self._rests = threading.Event()  # set while nobody encodes
        self._rests.set()
        self._next = 0.0  # moment at which a step may start beside an encoder

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Have steps leave time meanwhile."""
        self._rests.clear()
        try:
            yield
        finally:
            self._rests.set()

    def step(self, compute: Callable[[], T]) -> T:
        """Compute a step as soon as the encoder has had its time since the last one. Without an
        encoder that is at once."""
        if self._rests.is_set():
            return compute()
        wait = self._next - time.perf_counter()
        if wait > 0:
            self._rests.wait(wait)
        started = time.perf_counter()
        try:
            return compute()
        finally:
            ended = time.perf_counter()
            self._next = ended + self._share * (ended - started)
