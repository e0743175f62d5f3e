"""Memory that the ranks of one host share: counts of their exchanges, and what they exchange.

It has no name (memfd_create), so nothing of it stays in the system, whatever ends a process. The
layout is that of csrc/exchange/group.h.

    control · a line for each rank · from a page on, two places of `slot_bytes` for each rank
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["SLOT_BYTES", "SharedRegion"]

SLOT_BYTES: Final = 2**20
"""Longer exchanges take several turns."""

_LINE = 128
_PAGE = 4096
_ABORTED, _FAILED, _SIZE = 0, 1, 2  # 32-bit words of the control
_ARRIVED, _AGREED, _VOTES, _MARKS, _BEAT = 0, 1, 3, 6, 16  # of a rank's line

Words = npt.NDArray[np.uint32]


class SharedRegion:
    """The region of `size` ranks, mapped in this process. Linux alone has such memory."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: descriptor of a region that `create` has made, in this process or
        in a parent."""
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._words = self._bytes.view(np.uint32)
        self.size = int(self._words[_SIZE])
        self.slot_bytes = int(self._bytes[16:24].view(np.int64)[0])

    @classmethod
    def create(cls, size: int, slot_bytes: int = SLOT_BYTES) -> SharedRegion:
        """A new region for `size` ranks."""
        descriptor = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, _first_slot(size) + 2 * size * slot_bytes)
            with mmap.mmap(descriptor, _LINE) as control:
                control[4 * _SIZE : 4 * _SIZE + 4] = size.to_bytes(4, "little")
                control[16:24] = slot_bytes.to_bytes(8, "little")
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def address(self) -> int:
        """The address of its first byte, for kernels."""
        return self._bytes.ctypes.data

    @property
    def is_aborted(self) -> bool:
        return bool(self._words[_ABORTED])

    def abort(self) -> None:
        """End the group. All who wait in it, or will, are told so."""
        self._words[_ABORTED] = 1

    def beat(self, rank: int) -> None:
        """Say that a rank is alive."""
        line = self._line(rank)
        line[_BEAT] = (int(line[_BEAT]) + 1) % 2**32

    def beats(self) -> Sequence[int]:
        """Return how often each rank has said so."""
        return [int(self._line(rank)[_BEAT]) for rank in range(self.size)]

    # --- what exchanges count -------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """True if a rank has failed in its step, and not all have agreed on it yet."""
        return bool(self._words[_FAILED])

    @failed.setter
    def failed(self, value: bool) -> None:
        self._words[_FAILED] = value

    def counts(self, rank: int) -> Words:
        """A rank's [exchanges, agreements] that it has announced; writable."""
        return self._line(rank)[_ARRIVED : _AGREED + 1]

    def votes(self, rank: int) -> Words:
        """Return, by the parity of an agreement, whether the rank was fine; the number of its last
        exchange when it voted; by parity again, its mark. Writable."""
        return self._line(rank)[_VOTES : _MARKS + 2]

    def slot(self, rank: int, number: int) -> npt.NDArray[np.uint8]:
        """The place where a rank leaves what it gives in exchange `number`."""
        start = _first_slot(self.size) + (2 * rank + number % 2) * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]

    def _line(self, rank: int) -> Words:
        start = _LINE * (1 + rank) // 4
        return self._words[start : start + _LINE // 4]

    def close(self) -> None:
        """Let go of the descriptor. The memory stays while something looks at it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _first_slot(size: int) -> int:
    return -(-_LINE * (1 + size) // _PAGE) * _PAGE
