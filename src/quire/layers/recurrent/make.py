"""Makes the parts of layers that keep a recurrent state, and gives each state its bytes."""

from __future__ import annotations

import torch

from quire.attention import StateInputs
from quire.config.model_spec import aligned_state
from quire.config.shard import Shard, Share
from quire.layers.recurrent.gated_delta import DeltaRule, DeltaShares
from quire.layers.recurrent.part import RecurrentPart, StateBytes
from quire.layers.recurrent.short_conv import ShortConv
from quire.ops import OpSet

__all__ = ["RecurrentLayers"]


class RecurrentLayers:
    """The parts of one model; the state of each follows those of the parts made before."""

    def __init__(self, ops: OpSet, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        self._ops, self._shard = ops, shard
        self._dtype, self._device = dtype, device
        self._parts: list[RecurrentPart] = []
        self._total = StateBytes()

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states in all parts made so far."""
        return self._total.states

    @property
    def kept_bytes(self) -> int:
        """Bytes of one token that these parts may have to compute again."""
        return self._total.kept

    def replay(self, kept: torch.Tensor, rows: StateInputs, starts: torch.Tensor) -> None:
        """Compute the states after tokens that a step has kept; see `RecurrentPart.replay`."""
        for part in self._parts:
            part.replay(kept, rows, starts)

    def short_conv(self, size: int, taps: int, *, bias: bool) -> ShortConv:
        """Make a gated convolution over the last `taps` tokens; each rank has an equal part of the
        channels."""
        channels = self._shard.equal(size, "channels of a convolution")
        return self.conv(channels, taps, bias=bias, gated=True)

    def conv(
        self, channels: Share, taps: int, *, bias: bool = False, gated: bool = False
    ) -> ShortConv:
        """Make a convolution of a rank's channels."""
        place = (self._total, self._dtype, self._device)
        conv = ShortConv(self._ops, channels, taps, *place, bias=bias, gated=gated)
        self._add(conv)
        return conv

    def delta_rule(self, shares: DeltaShares) -> DeltaRule:
        """Make a gated delta rule of a rank's heads."""
        rule = DeltaRule(self._ops, shares, self._total, self._dtype, self._device)
        self._add(rule)
        return rule

    def _add(self, part: RecurrentPart) -> None:
        self._parts.append(part)
        self._total.states += aligned_state(part.state_bytes)
        self._total.kept += part.kept_bytes
