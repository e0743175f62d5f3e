"""Weights of few bits in blocks along the inputs: the kinds that `linear_blocks` multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = ["BLOCK_KINDS", "E2M1_LEVELS", "IQ4_LEVELS", "BlockFormat", "BlockKind"]

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Levels of IQ4_NL and IQ4_XS, by code."""

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
E2M1_LEVELS = (*_E2M1, *(-level for level in _E2M1))
"""Twice the numbers of 1 sign, 2 exponent and 1 mantissa bits, which are integers (OCP
Microscaling Formats 1.0, 5.3.3)."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A weight is scale · factor · level + offset.

    bits: bits of a code. levels: levels by code; without, a level is the code less `zero_code`.
    group_size: inputs that share a factor. factors: whether groups have one (int8), else it is 1.
    offset: offset of a group: "minimum" · low (a low is a byte, 1 without factors), or - scale ·
    "zero" (int8) of the block, or nothing.
    """

    name: str
    bits: int
    zero_code: int = 0
    levels: tuple[int, ...] | None = None
    offset: Literal["none", "minimum", "zero"] = "none"
    factors: bool = False
    group_size: int = 32

    def matrix_bytes(self, outputs: int, inputs: int, block_size: int) -> int:
        """Bytes of a matrix [outputs, inputs] and of a power of two for each output."""
        of_block = {"none": 2, "minimum": 4, "zero": 3}[self.offset]
        of_group = 0 if not self.factors else 2 if self.offset == "minimum" else 1
        row = inputs * self.bits // 8 + inputs // block_size * of_block
        return outputs * (row + inputs // self.group_size * of_group + 4)


BLOCK_KINDS: Mapping[str, BlockKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockKind("w8", 8, 128),
            BlockKind("w8_zero", 8, 128, offset="zero"),
            BlockKind("w4_min", 4, offset="minimum"),
            BlockKind("w5", 5, 16),
            BlockKind("w5_min", 5, offset="minimum"),
            BlockKind("iq4", 4, levels=IQ4_LEVELS),
            BlockKind("e2m1", 4, levels=E2M1_LEVELS),
            BlockKind("iq4_k", 4, levels=IQ4_LEVELS, factors=True),
            BlockKind("w2_k", 2, offset="minimum", factors=True, group_size=16),
            BlockKind("w3_k", 3, 4, factors=True, group_size=16),
            BlockKind("w4_k", 4, offset="minimum", factors=True),
            BlockKind("w5_k", 5, offset="minimum", factors=True),
            BlockKind("w6_k", 6, 32, factors=True, group_size=16),
            BlockKind("w2_zero", 2, offset="zero"),
            BlockKind("w3_zero", 3, offset="zero"),
            BlockKind("w4", 4, 8),
            BlockKind("w4_zero", 4, offset="zero"),
        )
    }
)
"""Kinds by name, in the order of `with_kind` of csrc/linear/integers/block_kinds.h."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Blocks of `size` inputs, a multiple of the kind's groups."""

    kind: BlockKind
    size: int

    @property
    def name(self) -> str:
        """blocks-<kind>-<size>."""
        return f"blocks-{self.kind.name}-{self.size}"

    @classmethod
    def named(cls, name: str) -> BlockFormat | None:
        """The format of this name; None for one of another kernel."""
        first, _, rest = name.partition("-")
        kind, _, size = rest.partition("-")
        return cls(BLOCK_KINDS[kind], int(size)) if first == "blocks" else None
