"""SqueezeLLM (Kim et al. 2023, arXiv:2306.07629): dense numbers from tables, and sparse ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.config.hf import RawConfig
from quire.config.packed.format import Format, PackedSettings, refused
from quire.config.packed.parts import INTEGERS, SCALES, Parts
from quire.config.packed.scheme import WORD, Scheme, table_kernels

__all__ = ["FORMAT", "SqueezeLLM"]


@dataclass(frozen=True, slots=True)
class SqueezeLLM(Scheme):
    """3 or 4 bits that index a table of the output's own; sparse numbers, and whole outputs, are
    added."""

    bits: int
    name: ClassVar[str] = "squeezellm"
    kinds: ClassVar[tuple[str, ...]] = (
        "qweight", "lookup_table", "rows", "cols", "vals", "full_rows", "full_row_indices"
    )  # fmt: skip
    floats: ClassVar[tuple[str, ...]] = ("lookup_table", "vals", "full_rows")
    dropped: ClassVar[tuple[str, ...]] = ("startrows",)
    added: ClassVar[tuple[str, ...]] = ("vals", "full_rows")

    def holds(self, parts: Parts) -> bool:
        return "qweight" in parts

    def measure(self, parts: Parts) -> tuple[int, int]:
        words, outputs = parts.matrix("qweight", INTEGERS)
        if words * WORD % self.bits:
            raise parts.refuse("qweight", f"whole words of {self.bits}-bit numbers")
        inputs = words * WORD // self.bits
        parts.expect("lookup_table", (outputs, 1 << self.bits), SCALES)
        if "vals" in parts or "rows" in parts:
            parts.expect("rows", (outputs + 1,), ("I32",))
            parts.expect("vals", parts.get("cols").shape, SCALES)
            parts.expect("cols", (parts.get("vals").num_elements,), ("I32",))
        if "full_rows" in parts or "full_row_indices" in parts:
            count = parts.get("full_row_indices").num_elements
            parts.expect("full_row_indices", (count,), ("I32",))
            parts.expect("full_rows", (inputs, count), SCALES)
        return outputs, inputs

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return table_kernels(self.bits, inputs, inputs, own_tables=True)


def read_squeezellm(raw: RawConfig) -> PackedSettings:
    bits = raw.read(int, "wbits", "bits")
    if bits not in (3, 4):
        raise refused(raw, "wbits", bits, "SqueezeLLM has 3 or 4")
    return PackedSettings(raw.source, SqueezeLLM(bits))


FORMAT = Format(
    methods={"squeezellm": read_squeezellm},
    readings="quire.config.packed.squeezellm.read:READINGS",
    marks=(".qweight",),
)
