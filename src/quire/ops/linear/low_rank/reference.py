"""Low-rank additions in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.linear.low_rank.tables import LowRankTables

__all__ = ["low_rank"]


def low_rank(
    y: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    tables: LowRankTables,
    of_all_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Shapes as in the contract (`quire.ops.linear.low_rank`)."""
    shrunk = torch.zeros((len(x), len(tables.parts), tables.max_rank))
    rows_of = {slot: (slots == slot).nonzero()[:, 0] for slot in slots.unique().tolist() if slot}
    for slot, rows in rows_of.items():
        for part in range(len(tables.parts)):
            rank = int(tables.ranks[slot - 1, part])
            a = tables.a[slot - 1, part, :rank].float()
            shrunk[rows, part, :rank] = x[rows].float() @ a.t()
    if of_all_ranks is not None:
        shrunk = of_all_ranks(shrunk.flatten(1)).view(shrunk.shape)
    for slot, rows in rows_of.items():
        first = 0
        for part, size in enumerate(tables.parts):
            rank = int(tables.ranks[slot - 1, part])
            columns = slice(first, first + size)
            first += size
            if rank == 0:
                continue
            b = tables.b[slot - 1, :rank, columns].float()
            added = shrunk[rows, part, :rank] @ b * tables.scales[slot - 1, part]
            y[rows, columns] = (y[rows, columns].float() + added).to(y.dtype)
