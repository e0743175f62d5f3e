"""Gated delta rule (Yang et al. 2024, arXiv:2412.06464): a recurrent layer with a matrix of each
head for a state, between a convolution and a gated norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quire.base.errors import ConfigError
from quire.compute.attention import StepInputs
from quire.compute.layers.adapted import Projection
from quire.compute.layers.norm import RMSNorm
from quire.compute.layers.recurrent.part import (
    RecurrentPart,
    RowOperation,
    StateBytes,
    numbers_of_heads,
)
from quire.compute.layers.recurrent.short_conv import ShortConv
from quire.compute.layers.weights import Placement
from quire.config.model_spec import DeltaHeads
from quire.config.shard import Shard, Share
from quire.ops import OpSet

__all__ = ["DeltaShares", "DeltaRule", "GatedDelta"]


@dataclass(frozen=True, slots=True)
class DeltaShares:
    """The heads of a rank: whole key heads with their values."""

    heads: DeltaHeads
    keys: Share
    values: Share

    @classmethod
    def of(cls, heads: DeltaHeads, shard: Shard) -> DeltaShares:
        """Raises ConfigError if ranks cannot share the key heads."""
        if heads.in_turn and shard.size > 1:
            raise ConfigError(
                f"tensor_parallel_size={shard.size}: ranks cannot share {heads.num_values} value "
                f"heads of {heads.num_keys} keys in the order of GGUF files; take the folder"
            )
        keys = shard.equal(heads.num_keys, "key heads")
        return cls(heads, keys, keys.times(heads.num_values // heads.num_keys))

    @property
    def channels(self) -> Share:
        """Elements of q, k and v, side by side."""
        keys = self.keys.times(self.heads.key_dim)
        return Share.joined([keys, keys, self.values.times(self.heads.value_dim)])

    @property
    def inputs(self) -> Mapping[str, Share]:
        """Outputs of the projection to q, k, v and z."""
        values = self.values.times(self.heads.value_dim)
        if self.heads.layout != "by_key":
            return {"qkv": self.channels, "z": values}
        return {"": self.keys.times(sum(self._sizes))}

    @property
    def gates(self) -> Mapping[str, Share]:
        """Outputs of the projection to b and a."""
        if not self._gates_by_key:
            return {"b": self.values, "a": self.values}
        return {"": self.keys.times(2 * self._group)}

    @property
    def input_orders(self) -> Mapping[str, torch.Tensor]:
        """Place on disk of each of the rank's inputs, if it is another."""
        return self._orders(self._sizes) if self.heads.layout == "by_key" else {}

    @property
    def gate_orders(self) -> Mapping[str, torch.Tensor]:
        """Place on disk of each of the rank's gates, if it is another."""
        return self._orders((self._group, self._group)) if self._gates_by_key else {}

    @property
    def _gates_by_key(self) -> bool:
        return self.heads.layout in ("by_key", "gates_by_key")

    @property
    def _group(self) -> int:
        return self.heads.num_values // self.heads.num_keys

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Sizes of q, k, v and z of a key head."""
        values = self._group * self.heads.value_dim
        return self.heads.key_dim, self.heads.key_dim, values, values

    def _orders(self, sizes: tuple[int, ...]) -> Mapping[str, torch.Tensor]:
        rows = torch.arange(self.keys.count * sum(sizes)).view(self.keys.count, -1)
        return {"": torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])}


class DeltaRule(RecurrentPart):
    """The rule over the heads of this rank, by row, as `quire.ops.recurrent.gated_delta` defines
    it."""

    def __init__(
        self,
        ops: OpSet,
        shares: DeltaShares,
        total: StateBytes,
        placement: Placement,
    ) -> None:
        heads, own = shares.heads, shares.values
        state_bytes = 4 * own.count * heads.key_dim * heads.value_dim
        widths = (shares.channels.count, 2 * own.count)
        numbers, self.weights = numbers_of_heads(("A_log", "dt_bias"), own, placement.device)
        keys = (shares.keys.count, heads.key_dim)
        operation = RowOperation(ops.gated_delta, numbers, (keys, heads.in_turn))
        super().__init__(ops, operation, total, state_bytes, torch.float32, widths, placement.dtype)

    def __call__(self, x: torch.Tensor, gates: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """x: q, k and v of each token, gates [T, 2 · H]: b and a → [T, H · Dv]. Reads and writes
        the rows' states."""
        return self.advance((x, gates), step)


class GatedDelta:
    """norm(rule(conv(q, k, v), b, a)) · silu(z); x [T, E] → [T, H · Dv] of this rank.

    inputs, gates: projections of x to q, k, v and z, and to b and a. norm: over each head, rounded
    once.
    """

    def __init__(
        self,
        ops: OpSet,
        inputs: Projection,
        gates: Projection,
        conv: ShortConv,
        rule: DeltaRule,
        norm: RMSNorm,
    ) -> None:
        self._norm_rows, self._times = ops.norm_rows, ops.activation_times
        self.inputs, self.gates = inputs, gates
        self.conv, self.rule, self.norm = conv, rule, norm

    def __call__(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Mix tokens with those before them. Reads and writes the rows' states."""
        mixed, size = self.inputs(x), self.conv.num_channels
        qkv, z = mixed[:, :size], mixed[:, size:]
        y = self.rule(self.conv(qkv, step), self.gates(x), step)
        self._norm_rows(y.view(-1, len(self.norm.weight)), self.norm.weight, self.norm.eps)
        return self._times(z, y, "silu")
