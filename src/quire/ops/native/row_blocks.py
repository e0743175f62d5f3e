"""The share of a row that one program of a Triton kernel processes."""

from __future__ import annotations

__all__ = ["power_of_two", "row_block", "row_warps"]

_ELEMENTS_PER_WARP = 256
"""8 elements per thread: one 16-byte access in 16 bits."""

_MAX_WARPS = 16


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n, 1 for n ≤ 1; blocks can have only such
    sizes."""
    return 1 << max(0, n - 1).bit_length()


def row_block(width: int) -> int:
    """Return the elements of a block that holds a whole row."""
    return power_of_two(width)


def row_warps(width: int) -> int:
    """Return the warps of a program that holds a whole row in registers."""
    return min(_MAX_WARPS, max(1, row_block(width) // _ELEMENTS_PER_WARP))
