"""`linear_by_head` by the C++ kernel (csrc/linear/linear_by_head.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from quire.ops.linear.by_head.contract import check_rows, check_weight
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, panel_width
from quire.ops.native.weight_arena import WeightArena
from quire.ops.pointwise.activation.cpu import gate_code

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[[torch.Tensor], CpuHeadMatrices]:
    """`linear_by_head` on `library`; contract in `quire.ops.linear.by_head`."""
    return partial(CpuHeadMatrices, library, WeightArena())


class CpuHeadMatrices:
    """`HeadMatrices` in the layout of `linear`, one head after the other."""

    def __init__(self, library: NativeLibrary, arena: WeightArena, weight: torch.Tensor) -> None:
        check_weight(weight)
        self._call, self._dtype = library.call, weight.dtype
        heads, outputs, inputs = self._shape = weight.shape
        width = panel_width(library.isa)
        size = -(-outputs // width) * width * (inputs + inputs % 2)
        packed = arena.zeros(heads * size * weight.element_size()).view(weight.dtype)
        weight = weight.contiguous()
        for head, matrix in enumerate(weight):
            library.call(
                "linear_pack",
                matrix.data_ptr(),
                packed[head * size :].data_ptr(),
                outputs,
                inputs,
                DTYPE_CODES[weight.dtype],
                gate_code(None),
            )
        self._packed = packed

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, H, I], out [T, H, O]."""
        heads, outputs, inputs = self._shape
        check_rows(x, out, (heads, outputs, inputs))
        self._call(
            "linear_by_head",
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            self._packed.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            len(x),
            heads,
            outputs,
            inputs,
            DTYPE_CODES[x.dtype],
            DTYPE_CODES[self._dtype],
        )
