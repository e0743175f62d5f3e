"""Matrices that stay as they are stored, or lie side by side, or take their inputs in another
order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.base.errors import EngineError
from quire.compute.quantization.packed.stored import StoredMatrix
from quire.ops import PackedMatrix
from quire.ops.linear.plain.contract import GatedPacked, IntoMatrix

__all__ = ["PanelMatrix", "PermutedMatrix", "SideBySide"]


class PanelMatrix:
    """`PackedMatrix` that is widened some outputs at a time, before their product. bias [O]; dtype:
    to which weights are rounded, as by `linear_tables`."""

    def __init__(self, stored: StoredMatrix, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._stored = stored
        self._bias = None if bias is None else bias.float()
        self._dtype = dtype

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        wide = x.float()
        y = wide.new_empty(*x.shape[:-1], self._stored.shape[0])
        for first, panel in self._stored.slices():
            y[..., first : first + len(panel)] = wide @ panel.to(self._dtype).float().t()
        if self._bias is not None:
            y += self._bias
        return y.to(out_dtype or x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        unique, places = ids.unique(return_inverse=True)
        found = [self._stored.numbers(row, row + 1) for row in unique.tolist()]
        return torch.cat(found).to(self._dtype)[places]


class SideBySide:
    """`PackedMatrix` of one input's several matrices, their outputs side by side. sizes: outputs of
    each."""

    def __init__(self, matrices: Sequence[PackedMatrix], sizes: Sequence[int]) -> None:
        self._matrices = tuple(matrices)
        self._sizes = tuple(sizes)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        y = x.new_empty(*x.shape[:-1], sum(self._sizes), dtype=out_dtype or x.dtype)
        rows, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for part, matrix in zip(outputs.split(self._sizes, dim=1), self._matrices, strict=True):
            if isinstance(matrix, IntoMatrix):
                matrix.into(rows, part)
            else:
                part.copy_(matrix(rows, out_dtype))
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        raise EngineError(f"Matrices side by side give no rows ({len(ids)} were asked for).")


class PermutedMatrix:
    """`PackedMatrix` over inputs in the order `order` [I], int64. take: `take_columns`."""

    def __init__(
        self,
        matrix: PackedMatrix,
        order: torch.Tensor,
        take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._matrix, self._take = matrix, take
        self._order, self._places = order, order.argsort()

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._matrix(self._take(x, self._order), out_dtype)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        taken = self._take(x, self._order)
        if isinstance(self._matrix, IntoMatrix):
            self._matrix.into(taken, out)
        else:
            out.copy_(self._matrix(taken, out.dtype))

    def ungated(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._matrix, GatedPacked), "it was packed for a gate"
        return self._matrix.ungated(self._take(x, self._order))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._take(self._matrix.rows(ids), self._places)
