"""Files of weights, whose pages are in memory while they are read."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

__all__ = ["MappedFile"]


class MappedFile:
    """One file, mapped while this, or a view of its bytes, is there. bytes: uint8 [N]."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def numbers(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes from `start` to `end` as numbers [N]; a copy if they are not aligned."""
        found = self.bytes[start:end]
        return (found.clone() if start % dtype.itemsize else found).view(dtype)

    def release(self, start: int, end: int) -> None:
        """Take the pages of these bytes out of this process's memory. A later read maps them again
        as they are in the file, so changes to a view of them are lost."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
