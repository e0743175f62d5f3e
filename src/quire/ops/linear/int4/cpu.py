"""`linear_int4` by the C++ kernel (csrc/linear/linear_int4.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from quire.ops.linear.int4.contract import check_arguments, pack_scale
from quire.ops.linear.int8.panels import PartialPanels, pad_columns
from quire.ops.linear.plain import PackedMatrix
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import packed_columns, weight_code
from quire.ops.native.weight_arena import WeightArena
from quire.ops.pointwise.activation.cpu import gate_code

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., PackedMatrix]:
    """`linear_int4` on `library`; contract in `quire.ops.linear.int4`."""
    return partial(_pack, library, WeightArena())


def _pack(
    library: NativeLibrary,
    arena: WeightArena,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    gate: str | None = None,
    rotation: int = 1,
    activation_bits: int = 8,
) -> PartialPanels:
    group_size = check_arguments(weight, scale, zero, bias, gate, rotation)
    outputs, groups = scale.shape
    half, power = pack_scale(scale)
    columns = packed_columns(outputs, gate)
    packed = arena.zeros(columns * groups * (group_size // 2 + half.itemsize))
    packed_zeros = None if zero is None else arena.zeros(columns * groups // 2)
    weight, half = weight.contiguous(), half.contiguous()
    zero = None if zero is None else zero.contiguous()
    library.call(
        "linear_int4_pack",
        weight.data_ptr(),
        half.data_ptr(),
        None if zero is None else zero.data_ptr(),
        packed.data_ptr(),
        None if packed_zeros is None else packed_zeros.data_ptr(),
        outputs,
        groups,
        group_size,
        gate_code(gate),
    )
    return PartialPanels(
        library,
        "linear_int4",
        [packed, packed_zeros, pad_columns(power, gate)],
        None if bias is None else pad_columns(bias, gate),
        sizes=[outputs, groups, group_size, rotation],
        depth=groups * group_size,
        dtype=dtype,
        gate=gate,
        codes=[weight_code(activation_bits, dtype)],
    )
