"""A gate as a separate operation, behind a provider without gates."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.ops.linear.plain.contract import PackedMatrix

__all__ = ["GatedMatrix"]


class GatedMatrix:
    """A `PackedMatrix` whose outputs are gated by a second call. apply: `activation_and_mul`."""

    def __init__(
        self, matrix: PackedMatrix, apply: Callable[[torch.Tensor, str], torch.Tensor], gate: str
    ) -> None:
        self._matrix, self._apply, self._gate = matrix, apply, gate

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._apply(self._matrix(x, out_dtype), self._gate)

    def ungated(self, x: torch.Tensor) -> torch.Tensor:
        return self._matrix(x)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._matrix.rows(ids)
