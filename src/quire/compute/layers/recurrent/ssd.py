"""Selective states of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060): a recurrent layer with a matrix
of each head for a state, between a convolution and a gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.compute.attention import StepInputs
from quire.compute.layers.adapted import Projection
from quire.compute.layers.norm import SharedRMSNorm
from quire.compute.layers.recurrent.part import (
    RecurrentPart,
    RowOperation,
    StateBytes,
    numbers_of_heads,
)
from quire.compute.layers.recurrent.short_conv import ShortConv
from quire.compute.layers.weights import Placement
from quire.config.model_spec import SSDHeads
from quire.config.shard import Shard, Share
from quire.ops import OpSet

__all__ = ["SSDShares", "SelectiveState", "StateSpace"]


@dataclass(frozen=True, slots=True)
class SSDShares:
    """The heads of a rank: whole groups, or a part of the only one."""

    heads: SSDHeads
    own: Share
    groups: Share

    @classmethod
    def of(cls, heads: SSDHeads, shard: Shard) -> SSDShares:
        """Raises ConfigError if ranks cannot share the heads, or the groups if there are some."""
        if heads.num_groups == 1:
            return cls(heads, shard.equal(heads.num_heads, "heads of states"), Share.whole(1))
        groups = shard.equal(heads.num_groups, "groups of heads with states")
        return cls(heads, groups.times(heads.num_heads // heads.num_groups), groups)

    @property
    def inner(self) -> Share:
        """Elements of x, of z, and of the result."""
        return self.own.times(self.heads.head_dim)

    @property
    def channels(self) -> Share:
        """Elements of x, B and C, side by side."""
        of_groups = self.groups.times(self.heads.state_size)
        return Share.joined([self.inner, of_groups, of_groups])

    @property
    def inputs(self) -> Share:
        """Outputs of the projection to z, x, B, C and steps."""
        return Share.joined([self.inner, self.channels, self.own])


class SelectiveState(RecurrentPart):
    """The recurrence over the heads of this rank, by row, as `quire.ops.recurrent.ssd` defines
    it."""

    def __init__(
        self,
        ops: OpSet,
        shares: SSDShares,
        total: StateBytes,
        placement: Placement,
    ) -> None:
        heads, own = shares.heads, shares.own
        state_bytes = 4 * own.count * heads.head_dim * heads.state_size
        widths = (shares.channels.count, own.count)
        numbers, self.weights = numbers_of_heads(("A_log", "dt_bias", "D"), own, placement.device)
        groups = (shares.groups.count, heads.state_size)
        operation = RowOperation(ops.ssd, numbers, (groups, heads.limits))
        super().__init__(ops, operation, total, state_bytes, torch.float32, widths, placement.dtype)

    def __call__(self, x: torch.Tensor, dt: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """x: x, B and C of each token, dt [T, H] → [T, H · P]. Reads and writes the rows'
        states."""
        return self.advance((x, dt), step)


class StateSpace:
    """norm(silu(z) · state(conv(x, B, C), dt)); x [T, E] → [T, H · P] of this rank.

    inputs: projection of x to z, x, B, C and dt. norm: over the heads of each group.
    """

    def __init__(
        self,
        ops: OpSet,
        inputs: Projection,
        conv: ShortConv,
        state: SelectiveState,
        norm: SharedRMSNorm,
    ) -> None:
        self._times = ops.activation_times
        self.inputs, self.conv, self.state, self.norm = inputs, conv, state, norm

    def __call__(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Mix tokens with those before them. Reads and writes the rows' states."""
        mixed, inner = self.inputs(x), len(self.norm.weight)
        end = inner + self.conv.num_channels
        y = self.state(self.conv(mixed[:, inner:end], step), mixed[:, end:], step)
        return self.norm(self._times(mixed[:, :inner], y, "silu"))
