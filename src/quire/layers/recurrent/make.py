"""Makes the parts of layers that keep a recurrent state, and gives each state its bytes."""

from __future__ import annotations

import torch

from quire.config.model_spec import aligned_state
from quire.config.shard import Shard, Share
from quire.layers.recurrent.gated_delta import DeltaRule, DeltaShares
from quire.layers.recurrent.short_conv import ShortConv
from quire.ops import OpSet

__all__ = ["RecurrentLayers"]


class RecurrentLayers:
    """The parts of one model; the state of each follows those of the parts made before.

    state_bytes: bytes of one sequence's states in all parts made so far.
    """

    def __init__(self, ops: OpSet, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        self._ops, self._shard = ops, shard
        self._dtype, self._device = dtype, device
        self.state_bytes = 0

    def short_conv(self, size: int, taps: int, *, bias: bool) -> ShortConv:
        """Make a gated convolution over the last `taps` tokens; each rank has an equal part of the
        channels."""
        channels = self._shard.equal(size, "channels of a convolution")
        return self.conv(channels, taps, bias=bias, gated=True)

    def conv(
        self, channels: Share, taps: int, *, bias: bool = False, gated: bool = False
    ) -> ShortConv:
        """Make a convolution of a rank's channels."""
        place = (self.state_bytes, self._dtype, self._device)
        conv = ShortConv(self._ops, channels, taps, *place, bias=bias, gated=gated)
        self.state_bytes += aligned_state(conv.state_bytes)
        return conv

    def delta_rule(self, shares: DeltaShares) -> DeltaRule:
        """Make a gated delta rule of a rank's heads."""
        rule = DeltaRule(self._ops, shares, self.state_bytes, self._device)
        self.state_bytes += aligned_state(rule.state_bytes)
        return rule
