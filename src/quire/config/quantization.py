"""Effects of `quantization`: the format of each matrix of a model, and the bytes that it saves.

One rule serves the memory plan and the loader. Embeddings that are only looked up, norms and biases
stay as they are: they are small, or read a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.config.model_spec import MatrixShape, ModelSpec

__all__ = [
    "INT4_FORMATS",
    "INT4_GROUP_SIZE",
    "INT8_MAX_INPUTS",
    "QUANTIZATIONS",
    "ROTATIONS",
    "FormatChoice",
    "Int4Groups",
    "choose_format",
    "matrix_bytes",
    "quantized_bytes",
    "rotation_of",
    "rotation_within",
    "shared_rotation",
]

INT8_MAX_INPUTS = 131_072
"""So many products of activations and weights fit an int32 sum: 127 · 128 · 2**17 < 2**31."""

INT4_GROUP_SIZE = 32
"""Group size of `int4`: the smallest that the kernels have, and the one with the least error."""

_FLOAT32_BYTES, _FLOAT16_BYTES = 4, 2
_INT4_GROUP_SIZES = (INT4_GROUP_SIZE, 64, 128)


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """A format with 4 bits per weight. size: inputs that share a scale. zero_points: a zero point
    for each group too; without, grids are symmetric around zero."""

    size: int = INT4_GROUP_SIZE
    zero_points: bool = True

    @property
    def name(self) -> str:
        """int4[-g<size>][-sym], the size unless it is that of `int4`."""
        size = "" if self.size == INT4_GROUP_SIZE else f"-g{self.size}"
        return f"int4{size}{'' if self.zero_points else '-sym'}"

    def holding(self, inputs: int) -> Int4Groups | None:
        """The same with the largest groups, up to these, that divide the inputs, or None."""
        sizes = [size for size in _INT4_GROUP_SIZES if size <= self.size and inputs % size == 0]
        return replace(self, size=max(sizes)) if sizes else None

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix [outputs, inputs]: its groups, and a power of two for each output."""
        groups = outputs * inputs // self.size
        values_and_scales = groups * (self.size // 2 + _FLOAT16_BYTES)
        zero_points = groups // 2 if self.zero_points else 0
        return values_and_scales + zero_points + outputs * _FLOAT32_BYTES


INT4_FORMATS: Mapping[str, Int4Groups] = {
    groups.name: groups
    for zero_points in (True, False)
    for groups in (Int4Groups(size, zero_points) for size in _INT4_GROUP_SIZES)
}
"""All 4-bit formats by name. docs/quantization.md has the cost of each in quality."""

QUANTIZATIONS = ("int8", *INT4_FORMATS)

ROTATIONS = (256, 64, 16)
"""Inputs of a block that is rotated in 8 bits, the best first. Roots of powers of four are powers
of two, so scales keep their bits where folders hold them times the root (`quire convert`)."""

_GOOD_ROTATION = 64
"""Blocks from here on may be chosen smaller, so that 8 ranks can share them."""


def rotation_of(name: str, inputs: int) -> int:
    """Return the block in which inputs of a matrix in the format `name` are rotated: in 4 bits a
    group, since other blocks make scales of groups alike; in 8 bits 1 where none divides them."""
    if name in INT4_FORMATS:
        return INT4_FORMATS[name].size
    return 1 if name == "plain" else next((b for b in ROTATIONS if inputs % b == 0), 1)


def shared_rotation(name: str, inputs: int, unit: int) -> int:
    """Return the block of a matrix whose inputs ranks may share in equal parts, of whole units.

    It does not depend on the number of ranks, and lies within the parts of 2 and of 4 ranks, so
    these have the bits of one; also of 8, unless that leaves blocks of fewer than
    `_GOOD_ROTATION`. Groups of 4 bits are never divided.
    """
    if name in INT4_FORMATS:
        return rotation_of(name, inputs)
    possible = [ranks for ranks in (8, 4, 2, 1) if inputs % (ranks * unit) == 0 or ranks == 1]
    if possible[0] == 8 and (block := rotation_of(name, inputs // 8)) >= _GOOD_ROTATION:
        return block
    return rotation_of(name, inputs // next(ranks for ranks in possible if ranks < 8))


def rotation_within(rotation: int, inputs: range) -> int:
    """Return the largest block up to `rotation` of which these inputs of a matrix are a number of
    whole ones."""
    edges = (inputs.start, inputs.stop)
    blocks = (block for block in ROTATIONS if block <= rotation)
    return next((block for block in blocks if not any(edge % block for edge in edges)), 1)


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """The format of one matrix. name: "plain" or one of `QUANTIZATIONS`. fallback: reason why the
    format that was asked for is not used, or None."""

    name: str
    fallback: str | None = None


def choose_format(quantization: str | None, shape: MatrixShape) -> FormatChoice:
    """The format that holds a matrix of `shape` under the setting `quantization`.

    The projection to logits keeps 8 bits under all formats of 4: in 4 bits it alone would add half
    as much error again as all other matrices together (docs/quantization.md).
    """
    if quantization is None:
        return FormatChoice("plain")
    fallback = None
    asked = INT4_FORMATS.get(quantization)
    if asked is not None and not shape.is_head:
        held = asked.holding(shape.inputs)
        if held == asked:
            return FormatChoice(asked.name)
        fallback = f"{asked.name} needs a multiple of {asked.size} inputs"
        if held is not None:
            return FormatChoice(held.name, fallback)
        if asked.size != INT4_GROUP_SIZE:
            fallback += f", the smallest groups one of {INT4_GROUP_SIZE}"
    if shape.inputs > INT8_MAX_INPUTS:
        return FormatChoice("plain", f"int8 holds at most {INT8_MAX_INPUTS:,} inputs")
    return FormatChoice("int8", fallback)


def matrix_bytes(name: str, outputs: int, inputs: int, dtype_bytes: int) -> int:
    """Return the bytes of a matrix [outputs, inputs] in a format. dtype_bytes: size of an element
    when plain."""
    if name == "plain":
        return outputs * inputs * dtype_bytes
    if name == "int8":
        return outputs * (inputs + _FLOAT32_BYTES)
    return INT4_FORMATS[name].matrix_bytes(outputs, inputs)


def quantized_bytes(spec: ModelSpec, quantization: str | None, plain_bytes: int) -> int:
    """Weights of a model that takes `plain_bytes` in `spec.dtype`, after quantization. Models of a
    third party that do not state their matrices count as they are."""
    saved = 0
    for shape in spec.matrices:
        chosen = choose_format(quantization, shape).name
        size = (shape.outputs, shape.inputs, spec.dtype_bytes)
        saved += shape.count * (matrix_bytes("plain", *size) - matrix_bytes(chosen, *size))
    return plain_bytes - saved
