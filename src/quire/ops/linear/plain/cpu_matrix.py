"""A packed matrix that one C++ kernel multiplies, whatever its weights are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops.linear.plain.contract import refuse_rows
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, input_rows, pointer, row_ids, row_stride
from quire.ops.native.replay import KernelCall
from quire.ops.pointwise.activation.cpu import APART, gate_code

__all__ = ["CpuMatrix"]


class CpuMatrix:
    """A `PackedMatrix` over weights that are packed for the kernels `<name>` and `<name>_rows`.

    packed: its buffers, in the order of the kernel's parameters. bias: float32, in the kernel's
    layout. sizes: numbers in the order of the kernel's parameters, O first. depth: inputs, I.
    dtype: dtype of `rows`. codes: arguments of the kernel `<name>` between the dtypes of its
    tensors and the gate.
    """

    def __init__(
        self,
        library: NativeLibrary,
        name: str,
        packed: Sequence[torch.Tensor | None],
        bias: torch.Tensor | None,
        *,
        sizes: Sequence[int],
        depth: int,
        dtype: torch.dtype,
        gate: str | None,
        codes: Sequence[int] = (),
    ) -> None:
        self._library, self._call, self._name = library, library.call, name
        self._kept = (*packed, bias)
        self._weights, self._bias = tuple(pointer(part) for part in packed), pointer(bias)
        self._sizes, self._codes = tuple(sizes), tuple(codes)
        self._outputs, self._depth, self._dtype = sizes[0], depth, dtype
        self._gate, self._gate_code = gate, gate_code(gate)
        self._width = self._outputs if gate is None else self._outputs // 2

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
        self._call(self._name, *self._arguments(rows, out, gate))

    def call_into(self, x: torch.Tensor, out: torch.Tensor) -> KernelCall:
        """Return the kernel call of `into` for rows x with contiguous elements."""
        return self._library.record(self._name, self._arguments(x, out, self._gate_code))

    def _arguments(
        self, rows: torch.Tensor, out: torch.Tensor, gate: int
    ) -> tuple[int | None, ...]:
        return (
            rows.data_ptr(),
            rows.stride(0),
            *self._weights,
            self._bias,
            out.data_ptr(),
            row_stride(out),
            rows.shape[0],
            *self._sizes,
            DTYPE_CODES[rows.dtype],
            DTYPE_CODES[out.dtype],
            *self._codes,
            gate,
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        refuse_rows(self._gate)
        ids = row_ids(ids)
        out = torch.empty((*ids.shape, self._depth), dtype=self._dtype)
        self._call(
            f"{self._name}_rows",
            *self._weights,
            ids.data_ptr(),
            ids.itemsize,
            out.data_ptr(),
            ids.numel(),
            *self._sizes,
            DTYPE_CODES[self._dtype],
        )
        return out
