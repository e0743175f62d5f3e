"""y[t, h] = W[h] x[t, h]."""

from __future__ import annotations

import torch

from quire.ops.linear.by_head.contract import check_rows, check_weight

__all__ = ["PlainHeadMatrices"]


class PlainHeadMatrices:
    """`HeadMatrices` that keep their weight unchanged, multiplied by torch head by head."""

    def __init__(self, weight: torch.Tensor) -> None:
        check_weight(weight)
        self._weight = weight.contiguous().clone()

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, H, I], out [T, H, O]."""
        heads, outputs, inputs = self._weight.shape
        check_rows(x, out, (heads, outputs, inputs))
        weight = self._weight if x.dtype == self._weight.dtype else self._weight.to(x.dtype)
        out.copy_(torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1))
