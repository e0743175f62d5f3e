"""Makes the parts of layers that keep a recurrent state, and gives each state its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from quire.compute.attention import StateInputs
from quire.compute.layers.adapted import Projection
from quire.compute.layers.norm import RMSNorm, SharedRMSNorm
from quire.compute.layers.recurrent.gated_delta import DeltaRule, DeltaShares, GatedDelta
from quire.compute.layers.recurrent.part import RecurrentPart, StateBytes
from quire.compute.layers.recurrent.short_conv import ShortConv
from quire.compute.layers.recurrent.ssd import SelectiveState, SSDShares, StateSpace
from quire.compute.layers.weights import NO_ORDERS, Placement
from quire.config.model_spec import DeltaHeads, SSDHeads, aligned_state
from quire.config.shard import Shard, Share
from quire.ops import OpSet

__all__ = ["Parts", "RecurrentLayers"]


class Parts(Protocol):
    """Makes the layers around a state; `LayerFactory` does."""

    def shared_linear(
        self,
        in_features: int,
        parts: Mapping[str, Share],
        *,
        bias: bool = False,
        orders: Mapping[str, torch.Tensor] = NO_ORDERS,
        is_plain: bool = False,
    ) -> Projection: ...

    def rms_norm(self, size: int, eps: float) -> RMSNorm: ...

    def shared_rms_norm(self, share: Share, eps: float, groups: Share) -> SharedRMSNorm: ...


class RecurrentLayers:
    """The parts of one model; the state of each follows those of the parts made before.

    make: makes the layers around them.
    """

    def __init__(self, ops: OpSet, shard: Shard, placement: Placement, make: Parts) -> None:
        self._ops, self._shard, self._make = ops, shard, make
        self._placement = placement
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
        conv = ShortConv(
            self._ops, channels, taps, self._total, self._placement, bias=bias, gated=gated
        )
        self._add(conv)
        return conv

    def gated_delta(self, size: int, heads: DeltaHeads, taps: int, eps: float) -> GatedDelta:
        """Make a gated delta rule behind a convolution over `taps` tokens; each rank has an equal
        part of the heads. Gates keep the model's dtype."""
        shares, linear = DeltaShares.of(heads, self._shard), self._make.shared_linear
        inputs = linear(size, shares.inputs, orders=shares.input_orders)
        gates = linear(size, shares.gates, orders=shares.gate_orders, is_plain=True)
        conv = self.conv(shares.channels, taps)
        rule = DeltaRule(self._ops, shares, self._total, self._placement)
        self._add(rule)
        norm = self._make.rms_norm(heads.value_dim, eps)
        return GatedDelta(self._ops, inputs, gates, conv, rule, norm)

    def state_space(
        self, size: int, heads: SSDHeads, taps: int, eps: float, *, bias: bool, conv_bias: bool
    ) -> StateSpace:
        """Make a selective state behind a convolution over `taps` tokens; each rank has an equal
        part of the heads. bias: whether the projection has one."""
        shares = SSDShares.of(heads, self._shard)
        inputs = self._make.shared_linear(size, {"": shares.inputs}, bias=bias)
        conv = self.conv(shares.channels, taps, bias=conv_bias)
        state = SelectiveState(self._ops, shares, self._total, self._placement)
        self._add(state)
        norm = self._make.shared_rms_norm(shares.inner, eps, shares.groups)
        return StateSpace(self._ops, inputs, conv, state, norm)

    def _add(self, part: RecurrentPart) -> None:
        self._parts.append(part)
        self._total.states += aligned_state(part.state_bytes)
        self._total.kept += part.kept_bytes
