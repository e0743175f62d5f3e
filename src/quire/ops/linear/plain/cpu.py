"""`linear` by the C++ kernel (csrc/linear/linear.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from quire.ops.linear.plain.contract import PackedMatrix, check_arguments, refuse_rows
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import (
    DTYPE_CODES,
    input_rows,
    packed_columns,
    row_ids,
    row_stride,
)
from quire.ops.native.replay import KernelCall
from quire.ops.native.weight_arena import WeightArena
from quire.ops.pointwise.activation.cpu import APART, gate_code

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., PackedMatrix]:
    """`linear` on `library`; contract in `quire.ops.linear.plain`."""
    return partial(_CpuMatrix, library, WeightArena())


class _CpuMatrix:
    """Panels of output columns, K-major in pairs; 16-bit weights keep their 16 bits."""

    def __init__(
        self,
        library: NativeLibrary,
        arena: WeightArena,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gate: str | None = None,
    ) -> None:
        check_arguments(weight, bias, gate)
        self._library, self._call = library, library.call
        self._outputs, self._depth = weight.shape
        self._dtype = weight.dtype
        self._code = DTYPE_CODES[weight.dtype]
        self._gate, self._gate_code = gate, gate_code(gate)
        self._width = self._outputs if gate is None else self._outputs // 2
        size = packed_columns(self._outputs, gate) * (self._depth + self._depth % 2)
        self._packed = arena.zeros(size * weight.element_size()).view(weight.dtype)
        self._bias = None if bias is None else bias.float().contiguous()
        self._pointer = self._packed.data_ptr()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        weight = weight.contiguous()
        self._call(
            "linear_pack",
            weight.data_ptr(),
            self._pointer,
            self._outputs,
            self._depth,
            self._code,
            self._gate_code,
        )

    @property
    def num_inputs(self) -> int:
        return self._depth

    @property
    def num_outputs(self) -> int:
        """Number of outputs, of a gated layer after its gate."""
        return self._width

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        rows = input_rows(x, self._depth)
        out = torch.empty((rows.shape[0], self._width), dtype=out_dtype or x.dtype)
        self.into(rows, out)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self._width)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._into(x, out, self._gate_code)

    def ungated(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0], self._outputs), dtype=x.dtype)
        self._into(x, out, gate_code(None) if self._gate is None else APART)
        return out

    def _into(self, x: torch.Tensor, out: torch.Tensor, gate: int) -> None:
        rows = input_rows(x, self._depth)
        self._call("linear", *self._arguments(rows, out, gate))

    def call_into(self, x: torch.Tensor, out: torch.Tensor) -> KernelCall:
        """Return the kernel call of `into` for rows x with contiguous elements."""
        return self._library.record("linear", self._arguments(x, out, self._gate_code))

    def _arguments(
        self, rows: torch.Tensor, out: torch.Tensor, gate: int
    ) -> tuple[int | None, ...]:
        return (
            rows.data_ptr(),
            rows.stride(0),
            self._pointer,
            self._bias_pointer,
            out.data_ptr(),
            row_stride(out),
            rows.shape[0],
            self._outputs,
            self._depth,
            DTYPE_CODES[rows.dtype],
            DTYPE_CODES[out.dtype],
            self._code,
            gate,
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        refuse_rows(self._gate)
        ids = row_ids(ids)
        out = torch.empty((*ids.shape, self._depth), dtype=self._dtype)
        self._call(
            "linear_rows",
            self._pointer,
            ids.data_ptr(),
            ids.itemsize,
            out.data_ptr(),
            ids.numel(),
            self._outputs,
            self._depth,
            self._code,
        )
        return out
