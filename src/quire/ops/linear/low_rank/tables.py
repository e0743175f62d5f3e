"""Low-rank matrices of several adapters, at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.base.errors import EngineError

__all__ = ["LowRankTables"]


class LowRankTables:
    """Matrices of up to S adapters for one projection, whose outputs are in P parts.

    a: [S, P, R, I]. b: [S, R, O], where the columns of each part belong to that part's A. ranks:
    int64 [S, P], the used size of both; 0 if an adapter does not change the part. scales: float32
    [S, P]. ends: int64 [P], where the outputs of each part end.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        inputs: int,
        parts: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """parts: number of outputs of each."""
        shape, outputs = (num_slots, len(parts)), sum(parts)
        self.a = torch.zeros((*shape, max_rank, inputs), dtype=dtype, device=device)
        self.b = torch.zeros((num_slots, max_rank, outputs), dtype=dtype, device=device)
        self.ranks = torch.zeros(shape, dtype=torch.int64, device=device)
        self.scales = torch.zeros(shape, dtype=torch.float32, device=device)
        self.ends = torch.tensor(parts, device=device).cumsum(0)
        self.parts = tuple(parts)

    @property
    def max_rank(self) -> int:
        """Largest rank of an adapter that fits."""
        return self.a.shape[2]

    def put(self, slot: int, part: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Fill one part of an adapter. a: [r, I]; b: [outputs of the part, r]. Raises EngineError
        if they do not fit."""
        rank, first = len(a), sum(self.parts[:part])
        if rank > self.max_rank or b.shape != (self.parts[part], rank):
            raise EngineError(
                f"A low-rank matrix of {list(b.shape)} x {list(a.shape)} does not fit "
                f"{self.parts[part]} outputs and rank {self.max_rank}; this is a bug."
            )
        self.a[slot, part, :rank] = a
        self.b[slot, :rank, first : first + self.parts[part]] = b.t()
        self.scales[slot, part] = scale
        self.ranks[slot, part] = rank

    def clear(self, slot: int) -> None:
        """Make the adapter of this slot add nothing."""
        self.ranks[slot] = 0
