"""Factors on embeddings, sublayers and logits, and Gemma's cap of logits."""

from __future__ import annotations

import torch

from quire.ops import OpSet

__all__ = ["Scale", "SoftCap"]


class Scale:
    """x · factor, in place. dtype: to which the factor is rounded first, as the weights expect."""

    def __init__(self, ops: OpSet, factor: float, dtype: torch.dtype | None) -> None:
        self._rescale = ops.rescale
        self._factor = factor if dtype is None else float(torch.tensor(factor, dtype=dtype))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._rescale(x, self._factor)


class SoftCap:
    """cap · tanh(x / cap), in place (Gemma 2, arXiv:2408.00118, section 2)."""

    def __init__(self, ops: OpSet, cap: float) -> None:
        self._rescale = ops.rescale
        self._cap = cap

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._rescale(x, 1.0, self._cap)
