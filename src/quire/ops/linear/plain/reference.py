"""y = x Wᵀ + b."""

from __future__ import annotations

import torch

from quire.ops.linear.plain.contract import check_arguments
from quire.ops.pointwise.activation.reference import activation_and_mul

__all__ = ["PlainMatrix", "gated", "widened_product"]

WIDENED_ROWS = 4096
"""Rows of the weight that are converted to float32 at a time, so that a large table never is as a
whole."""


class PlainMatrix:
    """A `PackedMatrix` that keeps its weight unchanged, multiplied by torch."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gate: str | None = None
    ) -> None:
        check_arguments(weight, bias, gate)
        self.weight, self.bias, self.gate = weight, bias, gate

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        out_dtype = out_dtype or x.dtype
        if x.dtype == self.weight.dtype == out_dtype:
            return gated(torch.nn.functional.linear(x, self.weight, self.bias), self.gate)
        y = widened_product(x, self.weight)
        return gated((y if self.bias is None else y + self.bias.float()).to(out_dtype), self.gate)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, self.weight)


def gated(y: torch.Tensor, gate: str | None) -> torch.Tensor:
    """Return y, or its gated form."""
    return y if gate is None else activation_and_mul(y, gate)


def widened_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x weightᵀ [..., O] in float32. Both x [..., I] and weight [O, I] are converted to
    float32 before the product."""
    wide = x.float()
    return torch.cat([wide @ part.float().t() for part in weight.split(WIDENED_ROWS)], dim=-1)
