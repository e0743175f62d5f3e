"""Ways in which matrices are quantized on disk: the tensors of each, and the kernel that serves it.

What the bits mean is in `quire.quantization.packed`, one file per format. `kernel` is the format of
`quire.config.quantization` in which a matrix has equal weights in memory, or None: then its
tensors are kept as they are stored, and widened some rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from quire.config.packed.parts import INTEGERS, SCALES, Parts
from quire.config.quantization import INT8_MAX_INPUTS, Int4Groups

__all__ = ["AWQ", "GPTQ", "Scheme"]

WORD = 32
"""Bits of the words into which numbers are packed."""

HALF_SCALES = ("F16", "BF16")
"""Scales that `linear_int4`, which has 11 significant bits for them, holds as they are."""


class Scheme(Protocol):
    """One way to hold a matrix [outputs, inputs]. name: of the method, for messages. kinds: what
    follows a module's name in those of its tensors. dropped: of tensors that say nothing about the
    weights."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    dropped: ClassVar[tuple[str, ...]]

    def holds(self, parts: Parts) -> bool:
        """Whether these tensors are a matrix in this scheme, and not a plain one."""
        ...

    def measure(self, parts: Parts) -> tuple[int, int]:
        """Outputs and inputs. Raises ConfigError unless all shapes and dtypes fit."""
        ...

    def kernel(self, parts: Parts, inputs: int) -> str | None: ...


@dataclass(frozen=True, slots=True)
class AWQ:
    """4 bits, scale and zero point per group. packing: "gemm", words of 8 outputs in an order of
    their own, or "gemv", words of 8 inputs. group_size: -1 is all inputs."""

    group_size: int
    packing: Literal["gemm", "gemv"]
    name: ClassVar[str] = "awq"
    kinds: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    dropped: ClassVar[tuple[str, ...]] = ()

    def holds(self, parts: Parts) -> bool:
        return "qweight" in parts

    def measure(self, parts: Parts) -> tuple[int, int]:
        first, second = parts.matrix("qweight", INTEGERS)
        if self.packing == "gemm":
            outputs, inputs = second * 8, first
            groups = self.num_groups(inputs)
            parts.expect("qzeros", (groups, second), INTEGERS)
            parts.expect("scales", (groups, outputs), SCALES)
        else:
            outputs, inputs = first, second * 8
            words = self._padded_words(inputs)
            parts.expect("qzeros", (outputs, words), INTEGERS)
            parts.expect("scales", (outputs, words * 8), SCALES)
        return outputs, inputs

    def num_groups(self, inputs: int) -> int:
        return num_groups(inputs, self.group_size)

    def _padded_words(self, inputs: int) -> int:
        """Words of zero points per output: those of "gemv" come in fours for groups of 32, in twos
        for groups of 64."""
        together = {32: 4, 64: 2}.get(self.group_size, 1)
        words = -(-self.num_groups(inputs) // 8)
        return -(-words // together) * together

    def kernel(self, parts: Parts, inputs: int) -> str | None:
        return int4_kernel(parts, "scales", inputs, self.group_size, zero_points=True)


@dataclass(frozen=True, slots=True)
class GPTQ:
    """2, 3, 4 or 8 bits, scale and zero point per group.

    group_size: -1 is all inputs. symmetric: all zero points are half of the range, whatever the
    tensor says. zeros_less_one: zero points are stored as z - 1 (the first version).
    """

    bits: int
    group_size: int
    symmetric: bool
    zeros_less_one: bool
    name: ClassVar[str] = "gptq"
    kinds: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    dropped: ClassVar[tuple[str, ...]] = ()

    def holds(self, parts: Parts) -> bool:
        return "qweight" in parts

    def measure(self, parts: Parts) -> tuple[int, int]:
        words, outputs = parts.matrix("qweight", INTEGERS)
        if words * WORD % self.bits or outputs * self.bits % WORD:
            raise parts.refuse("qweight", f"whole words of {self.bits}-bit numbers")
        inputs = words * WORD // self.bits
        groups = num_groups(inputs, self.group_size)
        parts.expect("scales", (groups, outputs), SCALES)
        if not self.symmetric or "qzeros" in parts:
            parts.expect("qzeros", (groups, outputs * self.bits // WORD), INTEGERS)
        if "g_idx" in parts:
            parts.expect("g_idx", (inputs,), ("I32", "I64"))
        return outputs, inputs

    def kernel(self, parts: Parts, inputs: int) -> str | None:
        if self.bits == 4:
            zero_points = not self.symmetric
            return int4_kernel(parts, "scales", inputs, self.group_size, zero_points=zero_points)
        groups = num_groups(inputs, self.group_size)
        return int8_kernel(inputs) if self.bits == 8 and self.symmetric and groups == 1 else None


def num_groups(inputs: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-inputs // group_size)


def int4_kernel(
    parts: Parts, scales: str, inputs: int, group_size: int, *, zero_points: bool
) -> str | None:
    """The format with the largest groups that divide those of the checkpoint, whose scales are
    repeated then."""
    if parts.get(scales).dtype not in HALF_SCALES:
        return None
    size = inputs if group_size == -1 else group_size
    if size < inputs and inputs % size:
        return None
    held = Int4Groups(128, zero_points).holding(min(size, inputs))
    return None if held is None else held.name


def int8_kernel(inputs: int) -> str | None:
    return "int8" if inputs <= INT8_MAX_INPUTS else None
