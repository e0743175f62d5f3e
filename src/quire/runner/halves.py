"""What fails is computed again in halves, until the row at fault is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_halves"]

Part = TypeVar("Part")


def in_halves(
    rows: slice, compute: Callable[[slice], Part], alone: Callable[[int, Exception], Part]
) -> list[Part]:
    """Compute the rows of a slice, all at once if that raises nothing. Results of the parts in
    which they were computed, in order.

    alone: a row that raises by itself, and what it raised → the result that stands for it.
    """
    try:
        return [compute(rows)]
    except Exception as error:  # noqa: BLE001  whatever it is, it must end with its row
        if rows.stop - rows.start == 1:
            return [alone(rows.start, error)]
    middle = (rows.start + rows.stop) // 2
    first, second = slice(rows.start, middle), slice(middle, rows.stop)
    return in_halves(first, compute, alone) + in_halves(second, compute, alone)
