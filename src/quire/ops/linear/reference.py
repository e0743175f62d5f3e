"""y = x Wᵀ + b."""

from __future__ import annotations

import torch

__all__ = ["PlainMatrix"]


class PlainMatrix:
    """`PackedMatrix` as it came, multiplied by torch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, self.weight)
