"""`linear_int8` by the C++ kernel (csrc/linear/linear_int8.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from quire.ops.linear.int8.contract import check_arguments
from quire.ops.linear.int8.panels import PartialPanels, pad_columns
from quire.ops.linear.plain import PackedMatrix
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import packed_columns, weight_code
from quire.ops.native.weight_arena import WeightArena
from quire.ops.pointwise.activation.cpu import gate_code

__all__ = ["bind"]

QUAD = 4
"""Inputs of a column that are adjacent in memory; storage is padded to a multiple."""


def bind(library: NativeLibrary) -> Callable[..., PackedMatrix]:
    """`linear_int8` on `library`; contract in `quire.ops.linear.int8`."""
    return partial(_pack, library, WeightArena())


def _pack(
    library: NativeLibrary,
    arena: WeightArena,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    gate: str | None = None,
    rotation: int = 1,
    activation_bits: int = 8,
) -> PartialPanels:
    check_arguments(weight, scale, bias, gate, rotation)
    outputs, depth = weight.shape
    packed = arena.zeros(packed_columns(outputs, gate) * -(-depth // QUAD) * QUAD)
    weight = weight.contiguous()
    library.call(
        "linear_int8_pack",
        weight.data_ptr(),
        packed.data_ptr(),
        outputs,
        depth,
        gate_code(gate),
    )
    return PartialPanels(
        library,
        "linear_int8",
        [packed, pad_columns(scale, gate)],
        None if bias is None else pad_columns(bias, gate),
        sizes=[outputs, depth, rotation],
        depth=depth,
        dtype=dtype,
        gate=gate,
        codes=[weight_code(activation_bits, dtype)],
    )
