"""Quantized types of GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.config.packed.format import Format
from quire.config.packed.parts import Parts
from quire.config.packed.scheme import Scheme, block_kernel, found, int4_kernel

__all__ = ["FORMAT", "GGUFBlocks"]


@dataclass(frozen=True, slots=True)
class GGUFBlocks(Scheme):
    """A quantized type of GGUF files: rows of blocks. kind: its name there."""

    kind: str
    name: ClassVar[str] = "gguf"
    kinds: ClassVar[tuple[str, ...]] = ("blocks",)

    def holds(self, parts: Parts) -> bool:
        return "blocks" in parts

    def measure(self, parts: Parts) -> tuple[int, int]:
        return parts.matrix("blocks", (self.kind,))

    @property
    def block_size(self) -> int:
        """Inputs of a block."""
        return _GGUF_KINDS[self.kind][1]

    def kernels(self, inputs: int) -> tuple[str, ...]:
        kind, size = _GGUF_KINDS[self.kind]
        integers = int4_kernel(inputs, size, zero_points=False) if kind == "w4" else None
        return found(block_kernel(kind, inputs, size), integers)


_GGUF_KINDS = {
    "Q4_0": ("w4", 32),
    "Q4_1": ("w4_min", 32),
    "Q5_0": ("w5", 32),
    "Q5_1": ("w5_min", 32),
    "Q8_0": ("w8", 32),
    "Q2_K": ("w2_k", 256),
    "Q3_K": ("w3_k", 256),
    "Q4_K": ("w4_k", 256),
    "Q5_K": ("w5_k", 256),
    "Q6_K": ("w6_k", 256),
    "IQ4_NL": ("iq4", 32),
    "IQ4_XS": ("iq4_k", 256),
    "MXFP4": ("e2m1", 32),
}
"""Kinds of blocks and their inputs by type of GGUF."""


FORMAT = Format(
    methods={},
    readings="quire.config.packed.gguf.read:READINGS",
)
