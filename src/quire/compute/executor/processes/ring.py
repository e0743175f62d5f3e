"""A ring in shared memory: one process writes messages, several read all of them in order.

Layout: written u64 · bytes read, u64 per reader · from the next page on, the bytes

A message is its length u32, its kind u8 and its bytes. A message longer than the ring goes in
pieces, as readers make room. Each reader sleeps on an eventfd while nothing new is there. The
memory has no name (memfd_create).
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from quire.base.errors import EngineError

__all__ = ["RING_BYTES", "RingReader", "RingWriter", "create_ring"]

RING_BYTES: Final = 2**20
"""Size of the ring; the plan of a busy step has some kilobytes."""

_HEADER = struct.Struct("<IB")
_PAGE = 4096
_FULL_POLL_S = 0.0002


def create_ring(capacity: int = RING_BYTES) -> int:
    """The descriptor of a new ring."""
    descriptor = os.memfd_create("quire-plans", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _PAGE + capacity)
    return descriptor


class _Ring:
    """The ring, mapped in this process."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.counts = np.frombuffer(memory, np.int64, _PAGE // 8)
        self.bytes = memoryview(memory)[_PAGE:]

    def spans(self, start: int, count: int) -> tuple[tuple[int, int], ...]:
        """Return the range of `count` bytes from `start` on, or the two ranges around the end."""
        at = start % len(self.bytes)
        first = min(count, len(self.bytes) - at)
        return ((at, at + first), (0, count - first)) if first < count else ((at, at + first),)


class RingWriter:
    """The one writer; any thread may write. wakeups: an eventfd of each reader."""

    def __init__(
        self, descriptor: int, wakeups: Sequence[int], is_over: Callable[[], bool]
    ) -> None:
        """is_over: returns True to stop a write that waits for readers that make no room."""
        self._ring = _Ring(descriptor)
        self._readers = self._ring.counts[1 : 1 + len(wakeups)]
        self._wakeups = tuple(wakeups)
        self._is_over = is_over
        self._lock = threading.Lock()

    def write(self, kind: int, message: bytes) -> None:
        """Send a message to all readers. Raises EngineError if they no longer read."""
        with self._lock:
            self._write(_HEADER.pack(len(message), kind) + message)

    def _write(self, data: bytes) -> None:
        ring, written, done = self._ring, int(self._ring.counts[0]), 0
        while done < len(data):
            room = len(ring.bytes) - (written - int(self._readers.min()))
            if room <= 0:
                if self._is_over():
                    raise EngineError("the ranks of the model take no more steps")
                time.sleep(_FULL_POLL_S)
                continue
            count = min(room, len(data) - done)
            for start, stop in ring.spans(written, count):
                ring.bytes[start:stop] = data[done : done + stop - start]
                done += stop - start
            written += count
            ring.counts[0] = written
            for wakeup in self._wakeups:
                os.eventfd_write(wakeup, 1)


class RingReader:
    """Reader number `index`, in one thread."""

    def __init__(self, descriptor: int, index: int, wakeup: int) -> None:
        self._ring = _Ring(descriptor)
        self._place = 1 + index
        self._wakeup = wakeup

    def read(self) -> tuple[int, bytes]:
        """Wait for the next message: its kind and its bytes."""
        length, kind = _HEADER.unpack(self._take(_HEADER.size))
        return kind, self._take(length)

    def _take(self, count: int) -> bytes:
        ring, pieces = self._ring, list[bytes]()
        read = int(ring.counts[self._place])
        while count:
            available = min(int(ring.counts[0]) - read, count)
            if not available:
                os.eventfd_read(self._wakeup)
                continue
            pieces += [bytes(ring.bytes[a:b]) for a, b in ring.spans(read, available)]
            read += available
            count -= available
            ring.counts[self._place] = read
        return b"".join(pieces)
