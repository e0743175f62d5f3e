"""Feed-forward networks."""

from __future__ import annotations

from typing import Protocol

import torch

from quire.compute.layers.adapted import Additions, Projection
from quire.compute.layers.linear import Linear, MergedLinear
from quire.compute.layers.norm import LayerNorm
from quire.compute.layers.weights import LayerWeights
from quire.ops import OpSet

__all__ = ["MLP", "AdaptedGate", "ClassHeads", "GatedMLP", "ResidualBlock"]


class AdaptedGate:
    """act(gate) · up of a projection with parts "gate" and "up"; [T, size of a part]. If a row has
    an adapter, its contributions are added to both before the gate; other steps use the fused
    projection."""

    def __init__(
        self, ops: OpSet, gate_up: MergedLinear, additions: Additions, activation: str
    ) -> None:
        """gate_up: a projection with the activation as its gate."""
        self._gate_up = gate_up
        self._additions = additions
        self._activation_and_mul = ops.activation_and_mul
        self._kind = activation

    @property
    def weights(self) -> LayerWeights:
        """Weights of the projection."""
        return self._gate_up.weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._additions.are_none:
            return self._gate_up(x)
        y = self._gate_up.ungated(x)
        self._additions.add(y, x)
        return self._activation_and_mul(y, self._kind)


class GatedMLP:
    """down(act(gate(x)) · up(x)); x [T, E] → [T, E] (Shazeer 2020, equation 6).

    gate_up: act(gate(x)) · up(x), parts "gate" and "up", in this order.
    """

    def __init__(self, gate_up: Projection, down: Projection) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(x))


class MLP:
    """down(act(up(x))); x [T, E] → [T, E]."""

    def __init__(self, ops: OpSet, up: Projection, down: Projection, activation: str) -> None:
        self._activation = ops.activation
        self._kind = activation
        self.up, self.down = up, down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activation(self.up(x), self._kind))


class ResidualBlock:
    """x + silu(linear(x)); x [T, E] → [T, E] (Cai et al. 2024, arXiv:2401.10774, section 2.1.1)."""

    def __init__(self, ops: OpSet, linear: Projection) -> None:
        self._activation = ops.activation
        self._add = ops.add
        self.linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._add(x, self._activation(self.linear(x), "silu"))


class ScoreHead:
    """Logits of the classes of a decoder, by one projection; x [N, E] → float32 [N, C]."""

    def __init__(self, projection: Linear) -> None:
        self.projection = projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(x).float()


class ClassHead:
    """projection(tanh(dense(x))); x [N, E] → float32 [N, C] (Devlin et al. 2019, section 4.1)."""

    def __init__(self, dense: Linear, projection: Linear) -> None:
        self.dense, self.projection = dense, projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(torch.tanh(self.dense(x))).float()


class NormedClassHead:
    """projection(norm(act(dense(x)))); x [N, E] → float32 [N, C] (Warner et al. 2024,
    arXiv:2412.13663)."""

    def __init__(
        self, ops: OpSet, dense: Linear, activation: str, norm: LayerNorm, projection: Linear
    ) -> None:
        self._activation = ops.activation
        self._kind = activation
        self.dense, self.norm, self.projection = dense, norm, projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(self.norm(self._activation(self.dense(x), self._kind))).float()


class MakesLinear(Protocol):
    """Makes a projection in the model's dtype that each rank has whole."""

    def __call__(self, in_features: int, out_features: int, *, bias: bool) -> Linear: ...


class ClassHeads:
    """Makes heads for classes. Each rank has them whole, in the model's dtype even if other
    matrices have another format."""

    def __init__(self, ops: OpSet, linear: MakesLinear) -> None:
        self._ops, self._linear = ops, linear

    def dense(self, size: int, num_classes: int) -> ClassHead:
        linear = self._linear
        return ClassHead(linear(size, size, bias=True), linear(size, num_classes, bias=True))

    def normed(
        self, size: int, num_classes: int, activation: str, norm: LayerNorm, *, bias: bool
    ) -> NormedClassHead:
        """Make a head with a norm before its projection. bias: whether the layer before the norm
        has one."""
        dense = self._linear(size, size, bias=bias)
        projection = self._linear(size, num_classes, bias=True)
        return NormedClassHead(self._ops, dense, activation, norm, projection)

    def score(self, size: int, num_classes: int) -> ScoreHead:
        """Make a head of a single projection."""
        return ScoreHead(self._linear(size, num_classes, bias=False))
