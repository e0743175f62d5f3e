"""Operations that all ranks of a tensor-parallel group do together."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

__all__ = ["ALONE", "Alone", "Collectives"]


class Collectives(Protocol):
    """Every rank calls the same operations in the same order, with tensors of one shape."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: torch.Tensor, op: Literal["sum", "max"] = "sum") -> torch.Tensor:
        """x of all ranks, added or the largest of each element, with the same bits on each rank.
        A NaN stays NaN."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N] of all ranks side by side, in the order of the ranks: [..., size · N]."""
        ...


class Alone:
    """`Collectives` of one rank: every result is what was given."""

    size = 1

    def all_reduce(
        self,
        x: torch.Tensor,
        op: Literal["sum", "max"] = "sum",  # noqa: ARG002  the same for one rank
    ) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()
