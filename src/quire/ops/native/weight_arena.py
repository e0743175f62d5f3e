"""Memory for packed weights in huge pages, which is read faster in a stream."""

from __future__ import annotations

import torch

from quire.ops.native.huge_pages import HUGE_PAGE, map_huge_pages

__all__ = ["WeightArena"]

CHUNK = 32 * HUGE_PAGE
"""Address space that is reserved at a time; memory is used as it is written."""

LINE = 64
"""Bytes of a cache line, where every buffer begins."""


class WeightArena:
    """Buffers one behind the other in chunks, so that neighbours share a huge page; a page for each
    would waste half a page per matrix. A chunk is released with its last buffer."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def zeros(self, size: int) -> torch.Tensor:
        """Return `size` bytes of zeros."""
        padded = -(-size // LINE) * LINE
        if padded > len(self._chunk):
            self._chunk = map_huge_pages(max(padded, CHUNK))
        buffer, self._chunk = self._chunk[:size], self._chunk[padded:]
        return buffer
