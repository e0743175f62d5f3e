"""Computes failed rows again in halves, until the row at fault is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from quire.base.errors import EngineLostError
from quire.base.platform.interrupts import is_ctrl_c
from quire.compute.runner.rows import ScheduledRows
from quire.protocol.step import StepPlan

__all__ = ["in_halves", "in_order_of_writing"]

Part = TypeVar("Part")


def in_halves(
    rows: slice, compute: Callable[[slice], Part], alone: Callable[[int, BaseException], Part]
) -> list[Part]:
    """Compute the rows of a slice at once; if that raises, compute them in halves. Return the
    results of the computed parts, in order.

    alone: given a row that raises by itself and its exception, returns the result that stands for
    the row.
    """
    try:
        return [compute(rows)]
    except EngineLostError:  # which no row can be blamed for
        raise
    except BaseException as error:  # whatever it is, it must end with its row
        if is_ctrl_c(error):
            raise
        if rows.stop - rows.start == 1:
            return [alone(rows.start, error)]
    middle = (rows.start + rows.stop) // 2
    first, second = slice(rows.start, middle), slice(middle, rows.stop)
    return in_halves(first, compute, alone) + in_halves(second, compute, alone)


def in_order_of_writing(rows: ScheduledRows, plan: StepPlan) -> ScheduledRows:
    """Order rows for computing in halves. A row may read blocks that another entering row writes in
    the same step. One batch needs no order for that; in halves, writers must come before
    readers."""
    if len(plan.enter) < 2:
        return rows
    rank = {row.slot: i for i, row in enumerate(plan.enter)}
    ranks = np.array([rank.get(slot, -1) for slot in rows.slots.tolist()])
    return rows.select(np.argsort(ranks, kind="stable"))
