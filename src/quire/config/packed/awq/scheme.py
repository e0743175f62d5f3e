"""AWQ (Lin et al. 2023, arXiv:2306.00978), as AutoAWQ stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from quire.config.hf import RawConfig
from quire.config.packed.format import Format, PackedSettings, read_group_size, refused
from quire.config.packed.parts import INTEGERS, SCALES, Parts
from quire.config.packed.scheme import Scheme, block_kernel, found, int4_kernel, num_groups

__all__ = ["AWQ", "FORMAT", "read_awq"]


@dataclass(frozen=True, slots=True)
class AWQ(Scheme):
    """4 bits, scale and zero point per group. packing: "gemm", words of 8 outputs in an order of
    their own, or "gemv", words of 8 inputs. group_size: -1 is all inputs."""

    group_size: int
    packing: Literal["gemm", "gemv"]
    name: ClassVar[str] = "awq"
    kinds: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    floats: ClassVar[tuple[str, ...]] = ("scales",)

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
        """Words of zero points per output. Words of "gemv" come in fours for groups of 32, in twos
        for groups of 64."""
        together = {32: 4, 64: 2}.get(self.group_size, 1)
        words = -(-self.num_groups(inputs) // 8)
        return -(-words // together) * together

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return found(
            block_kernel("w4_zero", inputs, self.group_size),
            int4_kernel(inputs, self.group_size, zero_points=True),
        )


def read_awq(raw: RawConfig) -> PackedSettings:
    bits = raw.read(int, "bits", "w_bit", default=4)
    if bits != 4:
        raise refused(raw, "bits", bits, "AWQ has 4 bits; use GPTQ for others")
    packing = raw.read(str, "version", default="gemm").lower()
    if packing not in ("gemm", "gemv"):
        raise refused(raw, "version", packing, "use a checkpoint of version 'gemm' or 'gemv'")
    size = read_group_size(raw, "group_size", "q_group_size", default=128)
    return PackedSettings(raw.source, AWQ(size, "gemm" if packing == "gemm" else "gemv"))


FORMAT = Format(
    methods={"awq": read_awq},
    readings="quire.config.packed.awq.read:READINGS",
    files_beside={"quant_config.json": "awq"},
    marks=(".qweight",),
)
