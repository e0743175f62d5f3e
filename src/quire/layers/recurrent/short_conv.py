"""Short convolution: a recurrent layer that keeps a few tokens (arXiv:2511.23404, 2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.attention import StateInputs, StepInputs
from quire.config.shard import Share
from quire.layers.recurrent.part import RecurrentPart, StateBytes
from quire.layers.weights import Cut, DenseWeights
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
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
        gated: bool,
    ) -> None:
        size = channels.count
        widths = (3 * size if gated else size,)
        super().__init__(ops, total, (taps - 1) * size * dtype.itemsize, dtype, widths, dtype)
        self._short_conv, self._gated = ops.short_conv, gated
        self._weight = torch.empty((taps, channels.count), dtype=dtype, device=device)
        self._bias = None
        storage = {"weight": self._weight.t().unsqueeze(1)}
        if bias:
            self._bias = storage["bias"] = torch.empty(channels.count, dtype=dtype, device=device)
        cuts = {} if channels.is_whole else dict.fromkeys(storage, Cut(0, channels))
        self.weights = DenseWeights(storage, cuts=cuts)
        self.num_channels = size

    def __call__(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """x [T, 3 · E]: B, C and v of each token, or [T, E] → [T, E]. Reads and writes the rows'
        states."""
        return self.advance((x,), step)

    def compute(
        self,
        inputs: Sequence[torch.Tensor],
        states: torch.Tensor,
        rows: StateInputs,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        """See `RecurrentPart.compute`."""
        (x,) = inputs
        return self._short_conv(
            x,
            self._weight,
            self._bias,
            states,
            rows.read,
            rows.write,
            rows.slots,
            starts,
            rows.num_computed,
            self._gated,
        )
