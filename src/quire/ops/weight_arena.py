"""Memory for packed weights in huge pages, which a stream of weights reads faster."""

from __future__ import annotations

import contextlib
import mmap

import torch

__all__ = ["WeightArena"]

HUGE_PAGE = 2 * 2**20
CHUNK = 32 * HUGE_PAGE
"""Address space that is taken at a time; memory is used as it is written."""

LINE = 64
"""Bytes of a cache line, where every buffer begins."""


class WeightArena:
    """Buffers one behind the other in chunks, so that two share a huge page: a page for each would
    waste half a page per matrix. A chunk is given back when the last of its buffers is gone.

    Where the system has no huge pages on request, the pages are ordinary ones.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def zeros(self, size: int) -> torch.Tensor:
        """`size` bytes of zeros."""
        padded = -(-size // LINE) * LINE
        if padded > len(self._chunk):
            self._chunk = _map_chunk(max(padded, CHUNK))
        buffer, self._chunk = self._chunk[:size], self._chunk[padded:]
        return buffer


def _map_chunk(size: int) -> torch.Tensor:
    # Private: of shared memory, which is mmap's default, Linux makes no huge pages on request.
    pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that was built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages
    return memory[-memory.data_ptr() % HUGE_PAGE :]
