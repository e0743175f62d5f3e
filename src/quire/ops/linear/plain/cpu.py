"""`linear` by the C++ kernel (csrc/linear/linear.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from quire.ops.linear.plain.contract import PackedMatrix, check_arguments
from quire.ops.linear.plain.cpu_matrix import CpuMatrix
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, packed_columns
from quire.ops.native.weight_arena import WeightArena
from quire.ops.pointwise.activation.cpu import gate_code

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., PackedMatrix]:
    """`linear` on `library`; contract in `quire.ops.linear.plain`."""
    return partial(_pack, library, WeightArena())


def _pack(
    library: NativeLibrary,
    arena: WeightArena,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate: str | None = None,
) -> CpuMatrix:
    """Panels of output columns, K-major in pairs; 16-bit weights keep their 16 bits."""
    check_arguments(weight, bias, gate)
    outputs, depth = weight.shape
    code = DTYPE_CODES[weight.dtype]
    size = packed_columns(outputs, gate) * (depth + depth % 2)
    packed = arena.zeros(size * weight.element_size()).view(weight.dtype)
    weight = weight.contiguous()
    library.call(
        "linear_pack",
        weight.data_ptr(),
        packed.data_ptr(),
        outputs,
        depth,
        code,
        gate_code(gate),
    )
    return CpuMatrix(
        library,
        "linear",
        [packed],
        None if bias is None else bias.float().contiguous(),
        sizes=[outputs, depth],
        depth=depth,
        dtype=weight.dtype,
        gate=gate,
        codes=[code],
    )
