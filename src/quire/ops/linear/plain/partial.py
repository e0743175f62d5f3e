"""Partial sums of a plain matrix, by any provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.ops.linear.plain.contract import PackedMatrix

__all__ = ["PlainPartial", "ProductInPieces"]

Product = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""x [T, I] and the dtype of the result → x Wᵀ [T, O]."""


class ProductInPieces:
    """x Wᵀ in float32 over equal pieces of the inputs, which are added as a binary tree. Ranks that
    each have the pieces of a branch get the same bits as one that has all (arXiv:2511.17826)."""

    def __init__(
        self,
        pieces: Sequence[PackedMatrix],
        add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """pieces: one of two, four or eight. add: the operation."""
        self._pieces = pieces
        self._add = add

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        width = x.shape[-1] // len(self._pieces)

        def branch(first: int, count: int) -> torch.Tensor:  # holds one sum for each level
            if count == 1:
                columns = slice(first * width, (first + 1) * width)
                return self._pieces[first](x[..., columns], torch.float32)
            half = count // 2
            return self._add(branch(first, half), branch(first + half, half))

        return branch(0, len(self._pieces)).to(out_dtype)


class PlainPartial:
    """`PartialMatrix` over a product without its bias: float32 [O], None for none."""

    def __init__(self, matrix: Product, bias: torch.Tensor | None) -> None:
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
