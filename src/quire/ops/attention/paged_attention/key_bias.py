"""A bias of K that is added outside of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["KeyBias", "angle_table"]

POSITIONS = 64
"""Positions of a key block (csrc/attention/keys.h): tables are read block by block."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyBias:
    """A bias that attention adds to the keys that it reads, rotated by their positions.

    pairs: int32 [N], pair i rotates dims i and i + R/2 together. values: float32 [K, N, 2], the
    bias of both dims before rotation. cos, sin: float32 [R/2, P], `angle_table` of the tables that
    rotated K.
    """

    pairs: torch.Tensor
    values: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, position: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Return the bias at `position` [N], float32 [N, K, D]."""
        pairs = self.pairs.long()
        cos, sin = (table[pairs][:, position].t().unsqueeze(1) for table in (self.cos, self.sin))
        first, second = self.values.unbind(-1)
        lacking = torch.zeros(len(position), len(first), head_dim, device=position.device)
        lacking[..., pairs] = first * cos - second * sin
        lacking[..., pairs + len(self.cos)] = second * cos + first * sin
        return lacking


def angle_table(table: torch.Tensor) -> torch.Tensor:
    """cos or sin by position [P, R/2] → by pair [R/2, P'], P' the next multiple of a key block."""
    padded = torch.zeros(
        table.shape[1], -(-table.shape[0] // POSITIONS) * POSITIONS, device=table.device
    )
    padded[:, : table.shape[0]] = table.t()
    return padded
