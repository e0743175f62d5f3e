"""Short convolution: a recurrent layer that keeps a few tokens (arXiv:2511.23404, 2412.06464)."""

from __future__ import annotations

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers.recurrent.part import RecurrentPart, RowOperation, StateBytes
from quire.compute.layers.weights import Cut, DenseWeights, Placement
from quire.config.shard import Share
from quire.ops import OpSet

__all__ = ["ShortConv"]


class ShortConv(RecurrentPart):
    """The convolution over the channels of this rank, by row, as `quire.ops.recurrent.short_conv`
    defines it.

    num_channels: number of this rank's channels. gated: True for a convolution between two gates.
    """

    def __init__(
        self,
        ops: OpSet,
        channels: Share,
        taps: int,
        total: StateBytes,
        placement: Placement,
        *,
        bias: bool,
        gated: bool,
    ) -> None:
        size = channels.count
        widths = (3 * size if gated else size,)
        weight = placement.empty(taps, size)
        storage = {"weight": weight.t().unsqueeze(1)}
        if bias:
            storage["bias"] = placement.empty(size)
        operation = RowOperation(ops.short_conv, (weight, storage.get("bias")), (gated,))
        dtype = placement.dtype
        state_bytes = (taps - 1) * size * dtype.itemsize
        super().__init__(ops, operation, total, state_bytes, dtype, widths, dtype)
        cuts = {} if channels.is_whole else dict.fromkeys(storage, Cut(0, channels))
        self.weights = DenseWeights(storage, cuts=cuts)
        self.num_channels = size

    def __call__(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """x [T, 3 · E]: B, C and v of each token, or [T, E] → [T, E]. Reads and writes the rows'
        states."""
        return self.advance((x,), step)
