"""Integers with scales, which most formats are once their words are taken apart."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Integers", "fields", "neighbours", "spread"]

WORD = 32


class Integers(NamedTuple):
    """w[o, i] = (values[o, i] - zeros[o, g]) · scales[o, g], where g is the group of input i.

    values: uint8 or int8 [R, I]. zeros: integers [R, G], or one number for all groups. scales:
    float32 [R, G]. groups: int64 [I], or the number of neighbours that are a group.
    """

    values: torch.Tensor
    zeros: torch.Tensor | int
    scales: torch.Tensor
    groups: torch.Tensor | int

    @classmethod
    def joined(cls, parts: list[Integers]) -> Integers:
        """Outputs one below the other, with equal groups."""
        first = parts[0]
        zeros = first.zeros
        if isinstance(zeros, torch.Tensor):
            zeros = torch.cat(
                [part.zeros for part in parts if isinstance(part.zeros, torch.Tensor)]
            )
        values = torch.cat([part.values for part in parts])
        return cls(values, zeros, torch.cat([part.scales for part in parts]), first.groups)

    def taken(self, index: torch.Tensor) -> Integers:
        """Return the outputs `index`, int64."""
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[index]
        return Integers(self.values[index], zeros, self.scales[index], self.groups)

    def numbers(self) -> torch.Tensor:
        """float32 [R, I]."""
        levels = self.values.float()
        if isinstance(self.zeros, int):
            levels -= self.zeros
        else:
            levels -= spread(self.zeros.float(), self.groups, levels.shape[1])
        return levels.mul_(spread(self.scales, self.groups, levels.shape[1]))


def spread(values: torch.Tensor, groups: torch.Tensor | int, inputs: int) -> torch.Tensor:
    """values [R, G] → [R, I], that of its group for each input."""
    if not isinstance(groups, int):
        return values[:, groups]
    if values.shape[1] == 1:
        return values
    wide = values[:, :, None].expand(-1, -1, groups).reshape(len(values), -1)
    return wide[:, :inputs]


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] → uint8 [..., 32 n / bits]: numbers of `bits` bits, the lowest ones first. One
    goes on in the next word where `bits` does not divide a word."""
    if WORD % bits == 0:
        shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
        return (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(-2)
    shifts = torch.arange(WORD, dtype=torch.int32, device=words.device)
    stream = (words[..., None] >> shifts & 1).to(torch.uint8).flatten(-2).unflatten(-1, (-1, bits))
    found = stream[..., 0]
    for bit in range(1, bits):
        found = found | stream[..., bit] << bit
    return found


def neighbours(index: torch.Tensor, size: int) -> bool:
    """Return whether each run of `size` consecutive inputs is one group; index [I]."""
    order = torch.arange(len(index), device=index.device) // size
    return torch.equal(index, order.to(index.dtype))
