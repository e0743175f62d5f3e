"""Memory in huge pages, which is read faster in a stream, since fewer addresses must be
translated."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import torch

__all__ = ["HUGE_PAGE", "give_back", "map_huge_pages"]

HUGE_PAGE = 2 * 2**20


def map_huge_pages(size: int) -> torch.Tensor:
    """Return at least `size` bytes of zeros, uint8, that begin with a huge page.

    This reserves only address space. Memory is used as it is written, a huge page at a time, and
    released with the last view of the tensor. Where the system has no huge pages on request, the
    pages are ordinary ones.
    """
    # Private: Linux gives no huge pages on request for shared memory, which is mmap's default.
    pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that was built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages
    return memory[-memory.data_ptr() % HUGE_PAGE :]


def give_back(start: int, size: int) -> None:
    """Give the memory of `size` bytes of `map_huge_pages`, from the page at address `start`, back
    to the system. It reads as zeros then, and takes memory again as it is written."""
    if hasattr(mmap, "MADV_DONTNEED"):
        _madvise()(start, size, mmap.MADV_DONTNEED)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
