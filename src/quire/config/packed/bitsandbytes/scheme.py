"""4 and 8 bits as bitsandbytes stores them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.config.hf import RawConfig
from quire.config.packed.format import Format, PackedSettings
from quire.config.packed.parts import SCALES, Parts
from quire.config.packed.scheme import (
    Scheme,
    block_kernel,
    dtype_of,
    found,
    int8_kernel,
    table_kernels,
)

__all__ = ["BitsAndBytes4", "BitsAndBytes8", "BlockState", "FORMAT"]

BNB_BLOCK = 64
"""Numbers with one largest magnitude, which those of all usual sizes are multiples of."""


@dataclass(frozen=True, slots=True)
class BitsAndBytes4(Scheme):
    """4 bits that index a table of 16 numbers, times the largest magnitude of a block of them,
    which may be quantized itself."""

    name: ClassVar[str] = "bitsandbytes"
    kinds: ClassVar[tuple[str, ...]] = (
        "weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
        "weight.nested_quant_map", "weight.quant_state.bitsandbytes__nf4",
        "weight.quant_state.bitsandbytes__fp4",
    )  # fmt: skip
    floats: ClassVar[tuple[str, ...]] = (
        "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"
    )  # fmt: skip
    settings: ClassVar[tuple[str, ...]] = (
        "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"
    )  # fmt: skip

    def holds(self, parts: Parts) -> bool:
        return any(kind.startswith("weight.") for kind in parts.tensors)

    def measure(self, parts: Parts) -> tuple[int, int]:
        state = self.read_state(parts)
        outputs, inputs = state.shape
        if parts.get("weight").num_bytes != -(-outputs * inputs // 2):
            raise parts.refuse("weight", f"4 bits for each of {outputs} × {inputs} numbers")
        blocks = -(-outputs * inputs // state.block_size)
        parts.expect("weight.quant_map", (16,), ("F32",))
        if state.nested_block_size is None:
            parts.expect("weight.absmax", (blocks,), ("F32",))
        else:
            nested = -(-blocks // state.nested_block_size)
            parts.expect("weight.absmax", (blocks,), ("U8",))
            parts.expect("weight.nested_absmax", (nested,), ("F32",))
            parts.expect("weight.nested_quant_map", (256,), ("F32",))
        return outputs, inputs

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return table_kernels(4, inputs, BNB_BLOCK)

    def read_state(self, parts: Parts) -> BlockState:
        """Raises ConfigError for one that does not describe a matrix."""
        kind = self.state_of(parts.tensors)
        try:
            return BlockState.of(parts.read_small(kind))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise parts.refuse(kind, f"JSON with shape and blocksize ({error})") from error

    @staticmethod
    def state_of(tensors: Any) -> str:
        """The name of the state among the tensors."""
        names = [kind for kind in tensors if kind.startswith("weight.quant_state.")]
        return names[0] if names else "weight.quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, slots=True)
class BlockState:
    """Quantization state that bitsandbytes stores with a matrix. nested_block_size: largest
    magnitudes that share a scale themselves, and nested_offset is added to them; None if they are
    not quantized."""

    shape: tuple[int, int]
    block_size: int
    nested_block_size: int | None
    nested_offset: float

    @classmethod
    def of(cls, text: bytes) -> BlockState:
        """Raises what `json.loads` and conversions raise for a text that describes no matrix."""
        state: Any = json.loads(text)
        outputs, inputs = (int(size) for size in state["shape"])
        block, nested = int(state["blocksize"]), state.get("nested_blocksize")
        nested = None if nested is None else int(nested)
        offset = float(state.get("nested_offset") or 0.0)
        if min(outputs, inputs, block, nested or 1) < 1 or not math.isfinite(offset):
            raise ValueError("a size that is not positive")
        return cls((outputs, inputs), block, nested, offset)


@dataclass(frozen=True, slots=True)
class BitsAndBytes8(Scheme):
    """8 bits times a scale per output, SCB / 127 (LLM.int8, Dettmers et al. 2022)."""

    name: ClassVar[str] = "bitsandbytes"
    kinds: ClassVar[tuple[str, ...]] = ("weight", "SCB", "weight_format")
    floats: ClassVar[tuple[str, ...]] = ("SCB",)

    def holds(self, parts: Parts) -> bool:
        return dtype_of(parts, "weight") == "I8"

    def measure(self, parts: Parts) -> tuple[int, int]:
        outputs, inputs = parts.matrix("weight", ("I8",))
        parts.expect("SCB", (outputs,), SCALES)
        if "weight_format" in parts and any(parts.read_small("weight_format")):
            raise parts.refuse("weight_format", "0, which is rows")
        return outputs, inputs

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return found(block_kernel("w8", inputs, -1), int8_kernel(inputs))


def read_bitsandbytes(raw: RawConfig) -> PackedSettings:
    if raw.read(bool, "load_in_4bit", "_load_in_4bit", default=False):
        return PackedSettings(raw.source, BitsAndBytes4())
    return PackedSettings(raw.source, BitsAndBytes8())


FORMAT = Format(
    methods={"bitsandbytes": read_bitsandbytes},
    readings="quire.config.packed.bitsandbytes.read:READINGS",
    marks=(".SCB", ".absmax"),
)
