"""Floating-point numbers of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from quire.config.hf import RawConfig
from quire.config.packed.format import Format, PackedSettings, read_block, refused
from quire.config.packed.parts import SCALES, Parts
from quire.config.packed.scheme import WHOLE, Scheme, dtype_of, table_kernels

__all__ = ["FORMAT", "Float8"]


@dataclass(frozen=True, slots=True)
class Float8(Scheme):
    """e4m3 times a scale for the matrix, for each output, or for blocks. block: outputs and inputs
    that share a scale, None if they are all or one of the outputs."""

    block: tuple[int, int] | None = None
    name: ClassVar[str] = "fp8"
    kinds: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_inv")
    floats: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_scale_inv")
    dropped: ClassVar[tuple[str, ...]] = (
        "input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale"
    )  # fmt: skip

    def holds(self, parts: Parts) -> bool:
        return (dtype_of(parts, "weight") or "").startswith("F8_")

    def measure(self, parts: Parts) -> tuple[int, int]:
        outputs, inputs = parts.matrix("weight", ("F8_E4M3",))
        kind = self.scale_of(parts.tensors)
        dtypes = (*SCALES, "F8_E8M0")
        if self.block is not None:
            rows, columns = self.block
            parts.expect(kind, (-(-outputs // rows), -(-inputs // columns)), dtypes)
        else:
            shape = parts.get(kind).shape
            known = shape in (*WHOLE, (outputs,))
            parts.expect(kind, shape if known else (outputs, 1), dtypes)
        return outputs, inputs

    @staticmethod
    def scale_of(tensors: Any) -> str:
        """Return the scale's name; either name means a factor."""
        return "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return table_kernels(8, inputs, inputs if self.block is None else self.block[1])


def read_fp8(raw: RawConfig) -> PackedSettings:
    kind = raw.read(str, "fmt", "weight_format", default="e4m3").lower()
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise refused(raw, "fmt", kind, "use a checkpoint in e4m3")
    return PackedSettings(raw.source, Float8(read_block(raw, "weight_block_size")))


def read_modelopt(raw: RawConfig) -> PackedSettings:
    own = raw.section("quantization") or raw
    algorithm = own.read(str, "quant_algo", default="not stated")
    if algorithm != "FP8":
        advice = "use the FP8 checkpoint of the same model"
        raise refused(own, "quant_algo", algorithm, advice)
    return PackedSettings(own.source, Float8())


FORMAT = Format(
    methods={"fbgemm_fp8": read_fp8, "fp8": read_fp8, "modelopt": read_modelopt},
    readings="quire.config.packed.float8.read:READINGS",
    files_beside={"hf_quant_config.json": "modelopt"},
    marks=(".weight_scale_inv",),
)
