"""Ways in which matrices are quantized on disk: the tensors of each, and the kernel that serves it.

What the bits mean is in `quire.quantization.packed`, one file per format. `kernels` names the
formats in which a matrix has equal weights in memory, the best for a CPU first: those of
`quire.config.quantization`, a `BlockFormat` or a `TableFormat`. `PackedLayout.kernel_on` chooses.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, cast

from quire.config.packed.block_kinds import BLOCK_KINDS, BlockFormat
from quire.config.packed.parts import INTEGERS, SCALES, Parts
from quire.config.packed.table_format import TableFormat
from quire.config.quantization import INT8_MAX_INPUTS, Int4Groups

__all__ = [
    "AWQ",
    "GPTQ",
    "MXFP4",
    "BitsAndBytes4",
    "BitsAndBytes8",
    "Float8",
    "GGUFBlocks",
    "PackedIntegers",
    "PlainIntegers",
    "Scheme",
    "SqueezeLLM",
]

WORD = 32
"""Bits of the words into which numbers are packed."""

BNB_BLOCK = 64
"""Numbers with one largest magnitude, which those of all usual sizes are multiples of."""


class Scheme(Protocol):
    """One way to hold a matrix [outputs, inputs]. name: of the method, for messages. kinds: what
    follows a module's name in those of its tensors. floats: of these, numbers that must be finite.
    dropped: of tensors that say nothing about the weights."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    floats: ClassVar[tuple[str, ...]]
    dropped: ClassVar[tuple[str, ...]]

    def holds(self, parts: Parts) -> bool:
        """Return whether these tensors are a matrix in this scheme, and not a plain one."""
        ...

    def measure(self, parts: Parts) -> tuple[int, int]:
        """Outputs and inputs. Raises ConfigError unless all shapes and dtypes fit."""
        ...

    def kernels(self, inputs: int) -> tuple[str, ...]:
        """Names of formats with equal weights, best first."""
        ...


@dataclass(frozen=True, slots=True)
class AWQ:
    """4 bits, scale and zero point per group. packing: "gemm", words of 8 outputs in an order of
    their own, or "gemv", words of 8 inputs. group_size: -1 is all inputs."""

    group_size: int
    packing: Literal["gemm", "gemv"]
    name: ClassVar[str] = "awq"
    kinds: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    floats: ClassVar[tuple[str, ...]] = ("scales",)
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

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return found(
            block_kernel("w4_zero", inputs, self.group_size),
            int4_kernel(inputs, self.group_size, zero_points=True),
        )


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
    floats: ClassVar[tuple[str, ...]] = ("scales",)
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

    def kernels(self, inputs: int) -> tuple[str, ...]:
        plain, size = self.symmetric and self.bits >= 4, self.group_size
        kind = f"w{self.bits}" if plain else f"w{self.bits}_zero"
        integers = None
        if self.bits <= 4:
            integers = int4_kernel(inputs, size, zero_points=not self.symmetric)
        elif self.symmetric and num_groups(inputs, size) == 1:
            integers = int8_kernel(inputs)
        return found(block_kernel(kind, inputs, size), integers)


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """pack-quantized of compressed-tensors: 4 or 8 bits in words, a scale for each output and group
    of inputs. group_size: -1 is all inputs. symmetric: there are no zero points. by_token:
    activations are meant to have 8 bits, with one scale per token."""

    bits: int
    group_size: int
    symmetric: bool
    by_token: bool = False
    name: ClassVar[str] = "compressed-tensors"
    kinds: ClassVar[tuple[str, ...]] = (
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
    )  # fmt: skip
    floats: ClassVar[tuple[str, ...]] = ("weight_scale",)
    dropped: ClassVar[tuple[str, ...]] = ("input_scale", "input_zero_point", "output_scale")

    def holds(self, parts: Parts) -> bool:
        return "weight_packed" in parts

    def measure(self, parts: Parts) -> tuple[int, int]:
        outputs, words = parts.matrix("weight_packed", INTEGERS)
        inputs = words * WORD // self.bits
        if "weight_shape" in parts:
            stated = _read_shape(parts)
            if stated[0] != outputs or -(-stated[1] * self.bits // WORD) != words:
                raise parts.refuse("weight_packed", f"{self.bits} bits of shape {list(stated)}")
            inputs = stated[1]
        groups = check_scales(parts, outputs, inputs, self.group_size)
        if not self.symmetric:
            rows = -(-outputs * self.bits // WORD)
            parts.expect("weight_zero_point", (rows, groups), INTEGERS)
        if "weight_g_idx" in parts:
            parts.expect("weight_g_idx", (inputs,), ("I32", "I64"))
        return outputs, inputs

    def kernels(self, inputs: int) -> tuple[str, ...]:
        integers = None
        if self.bits == 4:
            integers = int4_kernel(inputs, self.group_size, zero_points=not self.symmetric)
        return compressed_kernels(self, inputs, integers)


@dataclass(frozen=True, slots=True)
class PlainIntegers:
    """int-quantized of compressed-tensors: a byte for each number, of which 4 bits may be used.
    group_size, symmetric, by_token: as in `PackedIntegers`."""

    bits: int
    group_size: int
    symmetric: bool
    by_token: bool = False
    name: ClassVar[str] = "compressed-tensors"
    kinds: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "weight_zero_point")
    floats: ClassVar[tuple[str, ...]] = ("weight_scale",)
    dropped: ClassVar[tuple[str, ...]] = ("input_scale", "input_zero_point", "output_scale")

    def holds(self, parts: Parts) -> bool:
        return _dtype(parts, "weight") == "I8"

    def measure(self, parts: Parts) -> tuple[int, int]:
        outputs, inputs = parts.matrix("weight", ("I8",))
        check_scales(parts, outputs, inputs, self.group_size)
        if not self.symmetric:
            shape = parts.get("weight_scale").shape
            parts.expect("weight_zero_point", shape, ("I8", "I32", "I64"))
        return outputs, inputs

    def kernels(self, inputs: int) -> tuple[str, ...]:
        integers = None
        if self.symmetric and self.bits == 4 and num_groups(inputs, self.group_size) > 1:
            integers = int4_kernel(inputs, self.group_size, zero_points=False)
        return compressed_kernels(self, inputs, integers)


@dataclass(frozen=True, slots=True)
class Float8:
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
        return (_dtype(parts, "weight") or "").startswith("F8_")

    def measure(self, parts: Parts) -> tuple[int, int]:
        outputs, inputs = parts.matrix("weight", ("F8_E4M3",))
        kind = self.scale_of(parts.tensors)
        dtypes = (*SCALES, "F8_E8M0")
        if self.block is not None:
            rows, columns = self.block
            parts.expect(kind, (-(-outputs // rows), -(-inputs // columns)), dtypes)
        else:
            shape = parts.get(kind).shape
            known = shape in (*_WHOLE, (outputs,))
            parts.expect(kind, shape if known else (outputs, 1), dtypes)
        return outputs, inputs

    @staticmethod
    def scale_of(tensors: Any) -> str:
        """Return the scale's name; either name means a factor."""
        return "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return table_kernels(8, inputs, inputs if self.block is None else self.block[1])


@dataclass(frozen=True, slots=True)
class MXFP4:
    """e2m1 times a power of two for 32 inputs (OCP Microscaling Formats 1.0), by the names of
    compressed-tensors, or by those of gpt-oss."""

    name: ClassVar[str] = "mxfp4"
    kinds: ClassVar[tuple[str, ...]] = (
        "weight_packed", "weight_scale", "weight_blocks", "weight_scales"
    )  # fmt: skip
    floats: ClassVar[tuple[str, ...]] = ()
    dropped: ClassVar[tuple[str, ...]] = ("input_scale", "weight_shape")

    def holds(self, parts: Parts) -> bool:
        return "weight_packed" in parts or "weight_blocks" in parts

    def measure(self, parts: Parts) -> tuple[int, int]:
        if "weight_blocks" in parts:
            shape = parts.get("weight_blocks").shape
            if len(shape) != 3 or shape[2] != 16 or parts.get("weight_blocks").dtype != "U8":
                raise parts.refuse("weight_blocks", "shape [outputs, inputs / 32, 16], dtype U8")
            outputs, groups = shape[:2]
            parts.expect("weight_scales", (outputs, groups), ("U8", "F8_E8M0"))
        else:
            outputs, size = parts.matrix("weight_packed", ("U8",))
            groups = size // 16
            if size % 16:
                raise parts.refuse("weight_packed", "a multiple of 32 inputs")
            parts.expect("weight_scale", (outputs, groups), ("U8", "F8_E8M0"))
        return outputs, groups * 32

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return found(block_kernel("e2m1", inputs, 32))


@dataclass(frozen=True, slots=True)
class BitsAndBytes4:
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
    dropped: ClassVar[tuple[str, ...]] = ()

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
class BitsAndBytes8:
    """8 bits times a scale per output, SCB / 127 (LLM.int8, Dettmers et al. 2022)."""

    name: ClassVar[str] = "bitsandbytes"
    kinds: ClassVar[tuple[str, ...]] = ("weight", "SCB", "weight_format")
    floats: ClassVar[tuple[str, ...]] = ("SCB",)
    dropped: ClassVar[tuple[str, ...]] = ()

    def holds(self, parts: Parts) -> bool:
        return _dtype(parts, "weight") == "I8"

    def measure(self, parts: Parts) -> tuple[int, int]:
        outputs, inputs = parts.matrix("weight", ("I8",))
        parts.expect("SCB", (outputs,), SCALES)
        if "weight_format" in parts and any(parts.read_small("weight_format")):
            raise parts.refuse("weight_format", "0, which is rows")
        return outputs, inputs

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return found(block_kernel("w8", inputs, -1), int8_kernel(inputs))


@dataclass(frozen=True, slots=True)
class SqueezeLLM:
    """3 or 4 bits that index a table of the output's own; sparse numbers, and whole outputs, are
    added."""

    bits: int
    name: ClassVar[str] = "squeezellm"
    kinds: ClassVar[tuple[str, ...]] = (
        "qweight", "lookup_table", "rows", "cols", "vals", "full_rows", "full_row_indices"
    )  # fmt: skip
    floats: ClassVar[tuple[str, ...]] = ("lookup_table", "vals", "full_rows")
    dropped: ClassVar[tuple[str, ...]] = ("startrows",)

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


@dataclass(frozen=True, slots=True)
class GGUFBlocks:
    """A quantized type of GGUF files: rows of blocks. kind: its name there."""

    kind: str
    name: ClassVar[str] = "gguf"
    kinds: ClassVar[tuple[str, ...]] = ("blocks",)
    floats: ClassVar[tuple[str, ...]] = ()
    dropped: ClassVar[tuple[str, ...]] = ()

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

_WHOLE = ((), (1,), (1, 1))
"""Shapes of a scale of the whole matrix."""


def _dtype(parts: Parts, kind: str) -> str | None:
    return parts.get(kind).dtype if kind in parts else None


def _read_shape(parts: Parts) -> tuple[int, int]:
    """Outputs and inputs, of the tensor that states them."""
    codes = {"I32": "<2i", "I64": "<2q"}
    stored = parts.get("weight_shape")
    if stored.dtype not in codes or stored.shape != (2,):
        raise parts.refuse("weight_shape", "two integers")
    outputs, inputs = struct.unpack(codes[stored.dtype], parts.read_small("weight_shape"))
    if inputs < 1:
        raise parts.refuse("weight_shape", f"sizes of at least 1, not {inputs}")
    return cast("int", outputs), cast("int", inputs)


def check_scales(parts: Parts, outputs: int, inputs: int, group_size: int) -> int:
    """The number of groups of inputs that have a scale. That of the whole matrix is one."""
    stored = parts.get("weight_scale")
    groups = num_groups(inputs, group_size)
    if groups > 1 or stored.shape not in (*_WHOLE, (outputs,)):
        parts.expect("weight_scale", (outputs, groups), SCALES)
    elif stored.dtype not in SCALES:
        raise parts.refuse("weight_scale", f"dtype {' or '.join(SCALES)}")
    return groups


def num_groups(inputs: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-inputs // group_size)


def found(*kernels: str | None) -> tuple[str, ...]:
    """The kernels that exist, without None."""
    return tuple(kernel for kernel in kernels if kernel is not None)


def table_kernels(
    bits: int, inputs: int, block: int, *, own_tables: bool = False
) -> tuple[str, ...]:
    """Table entries with a scale for blocks of `block` inputs, the last of which may be short."""
    held = TableFormat.holding(bits, inputs, block, own_tables=own_tables)
    return () if held is None else (held.name,)


def int4_kernel(inputs: int, group_size: int, *, zero_points: bool) -> str | None:
    """The format with the largest groups that divide those of the checkpoint, whose scales are
    repeated then. It has 11 significant bits for a scale; one that needs more is found while
    loading."""
    size = inputs if group_size == -1 else group_size
    if size < inputs and inputs % size:
        return None
    held = Int4Groups(128, zero_points).holding(min(size, inputs))
    return None if held is None else held.name


def block_kernel(kind: str, inputs: int, group_size: int) -> str | None:
    """Blocks of the checkpoint's groups, as `linear_blocks` has them."""
    size = inputs if group_size == -1 or group_size > inputs else group_size
    found = BLOCK_KINDS[kind]
    if size % found.group_size or inputs % size:
        return None
    return BlockFormat(found, size).name


def compressed_kernels(
    scheme: PackedIntegers | PlainIntegers, inputs: int, integers: str | None
) -> tuple[str, ...]:
    """Return the formats of a matrix, the best first. integers: that of `linear_int4`, if it has
    these weights.

    One scale of activations per token adds some 0.04 nats (KL) where scales of 32 inputs add 0.004,
    so only checkpoints that are meant so take it first (docs/quantization.md).
    """
    if integers is None and scheme.symmetric and num_groups(inputs, scheme.group_size) == 1:
        integers = int8_kernel(inputs)
    kind = f"w{scheme.bits}" if scheme.symmetric else f"w{scheme.bits}_zero"
    blocks = block_kernel(kind, inputs, scheme.group_size)
    return found(integers, blocks) if scheme.by_token else found(blocks, integers)


def int8_kernel(inputs: int) -> str | None:
    return "int8" if inputs <= INT8_MAX_INPUTS else None
