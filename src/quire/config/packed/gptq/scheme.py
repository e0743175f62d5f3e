"""GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and its successors store it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from quire.config.hf import RawConfig
from quire.config.packed.format import (
    Format,
    PackedSettings,
    SchemeRule,
    compile_pattern,
    read_group_size,
    refused,
)
from quire.config.packed.parts import INTEGERS, SCALES, Parts
from quire.config.packed.scheme import (
    WORD,
    Scheme,
    block_kernel,
    found,
    int4_kernel,
    int8_kernel,
    num_groups,
)

__all__ = ["FORMAT", "GPTQ", "read_gptq", "read_gptq_bits"]

GPTQ_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class GPTQ(Scheme):
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
    floats: ClassVar[tuple[str, ...]] = ("scales",)

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

    def kernels(self, inputs: int) -> tuple[str, ...]:
        plain, size = self.symmetric and self.bits >= 4, self.group_size
        kind = f"w{self.bits}" if plain else f"w{self.bits}_zero"
        integers = None
        if self.bits <= 4:
            integers = int4_kernel(inputs, size, zero_points=not self.symmetric)
        elif self.symmetric and num_groups(inputs, size) == 1:
            integers = int8_kernel(inputs)
        return found(block_kernel(kind, inputs, size), integers)


def read_gptq(raw: RawConfig) -> PackedSettings:
    layout = raw.read(str, "checkpoint_format", "format", default="gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        advice = "use a checkpoint in the format 'gptq' or 'gptq_v2'"
        raise refused(raw, "checkpoint_format", layout, advice)
    default = GPTQ(
        read_gptq_bits(raw),
        read_group_size(raw, "group_size", default=-1),
        raw.read(bool, "sym", default=True),
        zeros_less_one=layout == "gptq",
    )
    return PackedSettings(raw.source, default, _gptq_rules(raw, default))


def _gptq_rules(raw: RawConfig, default: GPTQ) -> tuple[SchemeRule, ...]:
    """`dynamic`: settings of their own by pattern; "+:" before a pattern means what none does, and
    "-:" leaves modules plain, which what is stored shows."""
    rules: list[SchemeRule] = []
    dynamic = raw.section("dynamic")
    for key in () if dynamic is None else dynamic:
        own = dynamic.section(key) if dynamic is not None and not key.startswith("-:") else None
        if own is not None:
            scheme = replace(
                default,
                bits=read_gptq_bits(own, default.bits),
                group_size=read_group_size(own, "group_size", default=default.group_size),
                symmetric=own.read(bool, "sym", default=default.symmetric),
            )
            rules.append(SchemeRule(compile_pattern(raw, key.removeprefix("+:")), scheme))
    return tuple(rules)


def read_gptq_bits(raw: RawConfig, default: int | None = None) -> int:
    bits = raw.read(int, "bits") if default is None else raw.read(int, "bits", default=default)
    if bits not in GPTQ_BITS:
        raise refused(raw, "bits", bits, f"GPTQ has {', '.join(map(str, GPTQ_BITS))}")
    return bits


FORMAT = Format(
    methods={"gptq": read_gptq},
    readings="quire.config.packed.gptq.read:READINGS",
    files_beside={"quantize_config.json": "gptq"},
    marks=(".qweight",),
)
