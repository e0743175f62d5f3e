"""Norms, alone or after an addition to the residual stream."""

from __future__ import annotations

import torch

from quire.compute.layers.adapter_contents import SlotContents, add_bias
from quire.compute.layers.weights import Cut, DenseWeights, Placement
from quire.config.shard import Share
from quire.ops import OpSet
from quire.ops.distributed import Collectives

__all__ = ["HeadNorm", "LayerNorm", "RMSNorm", "ResidualAdd", "SharedRMSNorm"]

ONE_GROUP = Share.whole(1)


class RMSNorm:
    """Root mean square norm over the last dimension, [..., N] → [..., N].

    offset: difference between the weight and that on disk (1 in Gemma). part: the weight's name on
    disk, below that of the norm; "" if it has that one.
    """

    def __init__(
        self,
        ops: OpSet,
        size: int,
        eps: float,
        placement: Placement,
        *,
        offset: float = 0.0,
        part: str = "weight",
    ) -> None:
        self._norm = ops.rms_norm
        self._add_norm = ops.add_rms_norm
        self.eps = eps
        self.weight = placement.empty(size)
        self.weights = DenseWeights({part: self.weight}, offset)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and that sum; without a residual the sum is x."""
        if residual is None:
            return self(x), x
        return self._add_norm(x, residual, self.weight, self.eps)


class HeadNorm:
    """Root mean square norm over each head, without a weight, in place."""

    def __init__(self, ops: OpSet, size: int, eps: float, placement: Placement) -> None:
        self._norm_rows = ops.norm_rows
        self._ones = placement.empty(size).fill_(1.0)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> None:
        """x [T, heads · size], rows with a stride."""
        size = len(self._ones)
        for start in range(0, x.shape[1], size):
            self._norm_rows(x[:, start : start + size], self._ones, self._eps)


class SharedRMSNorm:
    """Root mean square norm, in place, over a dimension that ranks share, [..., N] → [..., N].

    groups: share of equal groups of the dimension, each normed by itself; ranks that share more
    than one have whole groups.
    """

    def __init__(
        self,
        ops: OpSet,
        share: Share,
        eps: float,
        placement: Placement,
        collectives: Collectives,
        groups: Share = ONE_GROUP,
    ) -> None:
        self._eps = eps
        is_own = collectives.size == 1 or groups.total > 1
        self._norm_rows = ops.norm_rows if is_own else collectives.norm_rows
        self._size = share.count // groups.count
        self.weight = placement.empty(share.count)
        cuts = {} if share.is_whole else {"weight": Cut(0, share)}
        self.weights = DenseWeights({"weight": self.weight}, cuts=cuts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N]."""
        for start in range(0, len(self.weight), self._size):
            group = slice(start, start + self._size)
            self._norm_rows(x[:, group], self.weight[group], self._eps)
        return x


class LayerNorm:
    """Layer norm over the last dimension, [..., N] → [..., N].

    affine: has a weight, and with `bias` a bias too. offset: difference between the weight and that
    on disk (1 in Nemotron).
    """

    def __init__(
        self,
        ops: OpSet,
        size: int,
        eps: float,
        placement: Placement,
        *,
        affine: bool = True,
        bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        self._norm = ops.layer_norm
        self._add_norm = ops.add_layer_norm
        self._eps = eps
        self.weight = self.bias = None
        self.weights = DenseWeights({})
        if affine:
            parts = {"weight": placement.empty(size)}
            if bias:
                parts["bias"] = placement.empty(size)
            self.weight, self.bias = parts["weight"], parts.get("bias")
            self.weights = DenseWeights(parts, offset)
        self._biases: SlotContents[torch.Tensor] | None = None

    def adapt(self, biases: SlotContents[torch.Tensor]) -> None:
        """Let adapters of rows change the bias."""
        self._biases = biases

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._adapted(self._norm(x, self.weight, self.bias, self._eps))

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and that sum; without a residual the sum is x."""
        if residual is None:
            return self(x), x
        found, total = self._add_norm(x, residual, self.weight, self.bias, self._eps)
        return self._adapted(found), total

    def _adapted(self, found: torch.Tensor) -> torch.Tensor:
        if self._biases is not None:
            add_bias(found, self._biases)
        return found


class ResidualAdd:
    """x + residual, where no following norm would add them; x without a residual."""

    def __init__(self, ops: OpSet) -> None:
        self._add = ops.add

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return x if residual is None else self._add(x, residual)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum twice, in the interface of a norm."""
        total = self(x, residual)
        return total, total
