"""Partial sums of a plain matrix, by any provider."""

from __future__ import annotations

import torch

from quire.ops.linear.plain.contract import PackedMatrix

__all__ = ["PlainPartial"]


class PlainPartial:
    """`PartialMatrix` over a matrix that was packed without its bias: float32 [O], None for
    none."""

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None) -> None:
        self._matrix = matrix
        self.bias = None if bias is None else bias.float()

    def largest(self, x: torch.Tensor) -> None:
        """Rows are taken as they are."""

    def partial(
        self,
        x: torch.Tensor,
        largest: torch.Tensor | None = None,  # noqa: ARG002  as above
    ) -> torch.Tensor:
        return self._matrix(x, torch.float32)

    def complete(
        self,
        sums: torch.Tensor,
        largest: torch.Tensor | None,  # noqa: ARG002  as above
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        return (sums if self.bias is None else sums + self.bias).to(out_dtype)
