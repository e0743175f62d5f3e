"""Low-rank additions in torch."""

from __future__ import annotations

import torch

from quire.ops.linear.low_rank.tables import LowRankTables

__all__ = ["low_rank"]


def low_rank(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, tables: LowRankTables) -> None:
    """Shapes as in the contract (`quire.ops.linear.low_rank`)."""
    for slot in slots.unique().tolist():
        if slot == 0:
            continue
        rows = (slots == slot).nonzero()[:, 0]
        first = 0
        for part, size in enumerate(tables.parts):
            rank = int(tables.ranks[slot - 1, part])
            columns = slice(first, first + size)
            first += size
            if rank == 0:
                continue
            a = tables.a[slot - 1, part, :rank].float()
            b = tables.b[slot - 1, :rank, columns].float()
            added = (x[rows].float() @ a.t()) @ b * tables.scales[slot - 1, part]
            y[rows, columns] = (y[rows, columns].float() + added).to(y.dtype)
