"""Meaning of stored tensors, by a `Reading` for each scheme, and what the readings share: integers
with scales, which most formats are once their words are taken apart, and parts of matrices.

Files of this name import torch, unlike the rest of `quire.config`. Only the data side imports them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from quire.config.packed.scheme import WORD
from quire.ops.linear.blocks.contract import Blocks
from quire.ops.linear.tables.contract import Tables

__all__ = [
    "ALIGNMENT",
    "Axis",
    "BrokenError",
    "Integers",
    "Part",
    "Reading",
    "Tensors",
    "UncutError",
    "axes_of",
    "check_exponents",
    "check_index",
    "check_range",
    "fields",
    "neighbours",
    "spread",
]

ALIGNMENT = 32
"""Outputs at whose multiples every format can be cut."""

LARGEST_EXPONENT = 254
"""Largest power of two in 8 bits: 255 stands for NaN."""

Tensors = Mapping[str, torch.Tensor]
"""Tensors of a matrix, by what follows the module's name."""


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
    single = (words[..., None] >> shifts & 1).to(torch.uint8)
    stream = single.reshape(*words.shape[:-1], -1, bits)
    found = stream[..., 0]
    for bit in range(1, bits):
        found = found | stream[..., bit] << bit
    return found


def neighbours(index: torch.Tensor, size: int) -> bool:
    """Return whether each run of `size` consecutive inputs is one group; index [I]."""
    order = torch.arange(len(index), device=index.device) // size
    return torch.equal(index, order.to(index.dtype))


class UncutError(Exception):
    """A part would begin or end within what cannot be cut; the message says at which numbers it
    may."""


class Part(NamedTuple):
    """outputs, inputs: ranges of a matrix of `shape` that a rank has."""

    outputs: range
    inputs: range
    shape: tuple[int, int]


class Axis(NamedTuple):
    """Range that is taken of one dimension of `total` things, called `noun`."""

    taken: range
    total: int
    noun: str

    def of(self, tensor: torch.Tensor, dim: int, unit: int = 1, width: int = 1) -> torch.Tensor:
        """unit: things that lie in `width` indices of the dimension."""
        first, past = self.taken.start, self.taken.stop
        if first % unit or (past % unit and past != self.total):
            raise UncutError(f"{self.noun} {first} to {past}; it can be at multiples of {unit}")
        index = slice(first // unit * width, -(-past // unit) * width)
        return tensor[(slice(None),) * dim + (index,)]

    def words(self, tensor: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
        """Take numbers in words of 32 bits, some of which may lie in two words."""
        bits_together = math.lcm(WORD, bits)
        return self.of(tensor, dim, bits_together // bits, bits_together // WORD)

    def groups(self, tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """Take one index per group of `size` things; -1, or a single index: all of them."""
        return tensor if size == -1 or tensor.shape[dim] == 1 else self.of(tensor, dim, size)


def axes_of(part: Part) -> tuple[Axis, Axis]:
    outputs, inputs = part.shape
    return Axis(part.outputs, outputs, "outputs"), Axis(part.inputs, inputs, "inputs")


class BrokenError(Exception):
    """A tensor holds what it must not. kind: end of its name, after the module's. what: noun phrase
    for the fault."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(kind, what)
        self.kind, self.what = kind, what


def check_range(tensors: Tensors, kind: str, low: int, high: int) -> None:
    """Raise BrokenError for a tensor with a number outside `low` to `high`."""
    tensor = tensors.get(kind)
    if tensor is not None and tensor.numel():
        smallest, largest = (int(end) for end in tensor.aminmax())
        if smallest < low or largest > high:
            worst = smallest if smallest < low else largest
            raise BrokenError(kind, f"{worst}, which is not in {low} to {high}")


def check_index(
    tensors: Tensors, kind: str, scales: str, num_outputs: int, *, lowest: int = 0
) -> None:
    """Raise BrokenError for an index of inputs that names a group without scales."""
    if kind in tensors:
        check_range(tensors, kind, lowest, tensors[scales].numel() // num_outputs - 1)


def check_exponents(tensors: Tensors, *kinds: str) -> None:
    """Raise BrokenError for a power of two that stands for NaN."""
    for kind in kinds:
        if kind in tensors and tensors[kind].dtype == torch.uint8:
            check_range(tensors, kind, 0, LARGEST_EXPONENT)


class Reading(NamedTuple):
    """Meaning of the tensors of a scheme. Each function takes the scheme and its tensors first.

    define: makes some outputs; its third argument is a slice whose ends are multiples of
    `ALIGNMENT`, or the last output. It may raise BrokenError.
    cut: makes the tensors of a `Part`, its third argument. A part begins and ends where a word, a
    block or a group of the scheme does; elsewhere the function raises UncutError.
    check: raises BrokenError for tensors that cannot be read; its third argument is the shape.
    """

    define: Callable[..., Blocks | Integers | Tables]
    cut: Callable[..., dict[str, torch.Tensor]]
    check: Callable[..., None] | None = None
