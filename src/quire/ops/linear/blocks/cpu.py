"""`linear_blocks` by the C++ kernel (csrc/linear/linear_blocks.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from quire.config.packed.block_kinds import BLOCK_KINDS
from quire.ops.linear.blocks.contract import Blocks, check_arguments, pack_scales
from quire.ops.linear.int8.panels import pad_columns
from quire.ops.linear.plain import PackedMatrix
from quire.ops.linear.plain.cpu_matrix import CpuMatrix
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import packed_columns, pointer, weight_code
from quire.ops.native.weight_arena import WeightArena
from quire.ops.pointwise.activation.cpu import gate_code

__all__ = ["bind"]

_NUMBERS = {name: number for number, name in enumerate(BLOCK_KINDS)}


def bind(library: NativeLibrary) -> Callable[..., PackedMatrix]:
    """`linear_blocks` on `library`; contract in `quire.ops.linear.blocks`."""
    return partial(_pack, library, WeightArena())


def _pack(
    library: NativeLibrary,
    arena: WeightArena,
    weight: Blocks,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    gate: str | None = None,
    activation_bits: int = 8,
) -> CpuMatrix:
    num_blocks, block_size = check_arguments(weight, bias, gate)
    kind, outputs = weight.kind, len(weight.codes)
    scale, minimum, power = pack_scales(weight)
    depth, number = num_blocks * block_size, _NUMBERS[kind.name]
    row_bytes = kind.matrix_bytes(1, depth, block_size) - power.itemsize
    packed = arena.zeros(packed_columns(outputs, gate) * row_bytes)
    parts = (weight.codes, scale, minimum, weight.factors, weight.lows)
    parts = [None if part is None else part.contiguous() for part in parts]
    sizes = (outputs, num_blocks, block_size, number)
    library.call(
        "linear_blocks_pack",
        *(pointer(part) for part in parts),
        packed.data_ptr(),
        *sizes,
        gate_code(gate),
    )
    return CpuMatrix(
        library,
        "linear_blocks",
        [packed, pad_columns(power, gate)],
        None if bias is None else pad_columns(bias, gate),
        sizes=sizes,
        depth=depth,
        dtype=dtype,
        gate=gate,
        codes=[weight_code(activation_bits, dtype)],
    )
