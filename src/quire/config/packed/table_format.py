"""Weights that are kept as indices into tables of floating-point numbers: the weights of
`linear_tables`."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["TABLE_BITS", "TableFormat"]

TABLE_BITS = (3, 4, 8)
"""Bits that a code may have."""

LEAST_BLOCK = 16
"""Inputs that share a scale, at least: fewer would take more memory for scales than for codes."""

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class TableFormat:
    """Codes of so many bits, with a scale in float32 for blocks of `size` inputs. own_tables: each
    output has a table; else one serves all."""

    bits: int
    size: int
    own_tables: bool = False

    @property
    def name(self) -> str:
        """tables-<bits>-<size>, with "-own" behind it if outputs have tables."""
        return f"tables-{self.bits}-{self.size}{'-own' if self.own_tables else ''}"

    @classmethod
    def named(cls, name: str) -> TableFormat | None:
        """The format of this name; None for one of another kernel."""
        first, *rest = name.split("-")
        return cls(int(rest[0]), int(rest[1]), len(rest) > 2) if first == "tables" else None

    @classmethod
    def holding(
        cls, bits: int, inputs: int, block: int, *, own_tables: bool = False
    ) -> TableFormat | None:
        """The format for scales of blocks of `block` inputs, whose blocks divide both those and a
        row; None if they would be too small."""
        size = math.gcd(inputs, block)
        if size % 4 or (size < LEAST_BLOCK and size < inputs):
            return None
        return cls(bits, size, own_tables)

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix [outputs, inputs] and of its tables."""
        row = inputs * self.bits // 8 + inputs // self.size * _FLOAT32_BYTES
        tables = outputs if self.own_tables else 1
        return outputs * row + tables * (_FLOAT32_BYTES << self.bits)
