"""Feed-forward networks."""

from __future__ import annotations

import torch

from quire.layers.linear import Linear, MergedLinear, RowLinear
from quire.ops import OpSet

__all__ = ["MLP", "GatedMLP"]


class GatedMLP:
    """down(act(gate(x)) · up(x)); x [T, E] → [T, E] (Shazeer 2020, equation 6).

    gate_up: act(gate(x)) · up(x), parts "gate" and "up", in this order.
    """

    def __init__(self, gate_up: MergedLinear, down: Linear | RowLinear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(x))


class MLP:
    """down(act(up(x))); x [T, E] → [T, E]."""

    def __init__(self, ops: OpSet, up: Linear, down: Linear | RowLinear, activation: str) -> None:
        self._activation = ops.activation
        self._kind = activation
        self.up, self.down = up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activation(self.up(x), self._kind))
