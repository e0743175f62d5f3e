"""Integers with scales, which most formats are once their words are taken apart."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Integers", "fields", "groups_of"]

WORD = 32


class Integers(NamedTuple):
    """w[o, i] = (values[o, i] - zeros[o, g]) · scales[o, g], where g is the group of input i.

    values: uint8 or int8 [R, I]. zeros: uint8 or int8 [R, G], or one number for all groups. scales:
    float32 [R, G]. groups: int64 [I], None if there is one.
    """

    values: torch.Tensor
    zeros: torch.Tensor | int
    scales: torch.Tensor
    groups: torch.Tensor | None

    def numbers(self) -> torch.Tensor:
        """float32 [R, I]."""
        zeros, scales, groups = self.zeros, self.scales, self.groups
        if groups is not None:
            scales = scales[:, groups]
            zeros = zeros if isinstance(zeros, int) else zeros[:, groups]
        levels = self.values.float() - (zeros if isinstance(zeros, int) else zeros.float())
        return levels * scales


def groups_of(inputs: int, num_groups: int, group_size: int) -> torch.Tensor | None:
    """Groups of neighbouring inputs."""
    return None if num_groups == 1 else torch.arange(inputs) // group_size


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
