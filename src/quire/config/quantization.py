"""What `quantization` does to each matrix of a model, and what that saves.

One rule serves the memory plan and the loader. Embeddings that are only looked up, norms and biases
stay as they are: they are small, or read a few rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.config.model_spec import MatrixShape, ModelSpec

__all__ = [
    "INT4_GROUP_SIZE",
    "INT8_MAX_INPUTS",
    "QUANTIZATIONS",
    "FormatChoice",
    "FormatName",
    "choose_format",
    "matrix_bytes",
    "quantized_bytes",
]

FormatName = Literal["plain", "int8", "int4"]

QUANTIZATIONS: tuple[FormatName, ...] = ("int8", "int4")

INT4_GROUP_SIZE = 32
"""Inputs that share a scale and a zero point: the smallest of the sizes that the kernels have.
Groups of 64 save a third of a bit per weight and add a quarter more error; groups without zero
points save an eighth of a bit and add a seventh (docs/quantization.md)."""

INT8_MAX_INPUTS = 131_072
"""So many products of two 8-bit numbers up to 127 fit an int32 sum: 127 · 127 · 2**17 < 2**31."""

_FLOAT32_BYTES, _FLOAT16_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """The format of one matrix. fallback: why it is not the one that was asked for, or None."""

    name: FormatName
    fallback: str | None = None


def choose_format(quantization: str | None, shape: MatrixShape) -> FormatChoice:
    """The format that holds a matrix of `shape` under the setting `quantization`.

    The projection to logits keeps 8 bits under int4: in 4 bits it alone would add half as much
    error again as all other matrices together (docs/quantization.md).
    """
    if quantization is None:
        return FormatChoice("plain")
    fallback = None
    if quantization == "int4" and not shape.is_head:
        if shape.inputs % INT4_GROUP_SIZE == 0:
            return FormatChoice("int4")
        fallback = f"int4 needs a multiple of {INT4_GROUP_SIZE} inputs"
    if shape.inputs > INT8_MAX_INPUTS:
        return FormatChoice("plain", f"int8 holds at most {INT8_MAX_INPUTS:,} inputs")
    return FormatChoice("int8", fallback)


def matrix_bytes(name: FormatName, outputs: int, inputs: int, dtype_bytes: int) -> int:
    """Bytes of a matrix [outputs, inputs] in a format; dtype_bytes: of an element when plain."""
    if name == "plain":
        return outputs * inputs * dtype_bytes
    if name == "int8":
        return outputs * (inputs + _FLOAT32_BYTES)
    groups = outputs * inputs // INT4_GROUP_SIZE
    values_and_scales = groups * (INT4_GROUP_SIZE // 2 + _FLOAT16_BYTES)
    zero_points = groups // 2
    return values_and_scales + zero_points + outputs * _FLOAT32_BYTES


def quantized_bytes(spec: ModelSpec, quantization: str | None, plain_bytes: int) -> int:
    """Weights of a model that takes `plain_bytes` in `spec.dtype`, after quantization. Models of a
    third party that do not state their matrices count as they are."""
    saved = 0
    for shape in spec.matrices:
        chosen = choose_format(quantization, shape).name
        size = (shape.outputs, shape.inputs, spec.dtype_bytes)
        saved += shape.count * (matrix_bytes("plain", *size) - matrix_bytes(chosen, *size))
    return plain_bytes - saved
