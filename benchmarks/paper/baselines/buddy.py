"""The buddy system (Knowlton 1965): pieces of memory whose sizes are powers of two."""

from __future__ import annotations

__all__ = ["BuddyAllocator"]


class BuddyAllocator:
    """Pieces of 2^order slots out of `num_slots`, which need not be a power of two itself.
    num_free: slots of no piece."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = self.num_free = num_slots
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def allocate(self, num_slots: int) -> tuple[int, int] | None:
        """(first slot, order) of the smallest piece that holds so many, or None."""
        order = (num_slots - 1).bit_length()
        found = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        for half in reversed(range(order, found)):
            self._free[half].add(start + (1 << half))
        self.num_free -= 1 << order
        return start, order

    def release(self, start: int, order: int) -> None:
        """Give a piece back, joined with its free buddies."""
        self.num_free += 1 << order
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)
