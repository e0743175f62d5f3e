"""Python side of the integer linear layers of csrc/linear/integers/int.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops.linear.plain.contract import refuse_rows
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, PANEL, input_rows, row_ids, row_stride
from quire.ops.native.replay import KernelCall
from quire.ops.pointwise.activation.cpu import APART, gate_code

__all__ = ["IntegerPanels", "PartialPanels", "pad_columns"]


class IntegerPanels:
    """A `PackedMatrix` over weights that are packed for the kernels `<name>` and `<name>_rows`.

    packed: its buffers, in the order of the kernel's parameters. scale, bias: float32 [O] padded by
    `pad_columns`. sizes: of the inputs, in the order of the kernel's parameters, I in all. kind:
    arguments that follow them.
    """

    def __init__(
        self,
        library: NativeLibrary,
        name: str,
        packed: Sequence[torch.Tensor | None],
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        outputs: int,
        sizes: Sequence[int],
        kind: Sequence[int] = (),
        dtype: torch.dtype,
        gate: str | None,
    ) -> None:
        self._library, self._call, self._name = library, library.call, name
        self._kept = (*packed, scale, bias)
        pointers = [None if part is None else part.data_ptr() for part in self._kept]
        self._table, self._bias = pointers[:-1], pointers[-1]
        self._outputs, self._sizes = outputs, (*sizes, *kind)
        self._gate, self._gate_code = gate, gate_code(gate)
        self._width = outputs if gate is None else outputs // 2
        self._depth = torch.Size(sizes).numel()
        self._dtype = dtype

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
            *self._table,
            self._bias,
            out.data_ptr(),
            row_stride(out),
            rows.shape[0],
            self._outputs,
            *self._sizes,
            DTYPE_CODES[rows.dtype],
            DTYPE_CODES[out.dtype],
            gate,
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        refuse_rows(self._gate)
        ids = row_ids(ids)
        out = torch.empty((*ids.shape, self._depth), dtype=self._dtype)
        self._call(
            f"{self._name}_rows",
            *self._table,
            ids.data_ptr(),
            ids.itemsize,
            out.data_ptr(),
            ids.numel(),
            self._outputs,
            *self._sizes,
            DTYPE_CODES[self._dtype],
        )
        return out


class PartialPanels(IntegerPanels):
    """`IntegerPanels` that are a `PartialMatrix` too, by the kernel `<name>_partial`: integers with
    one scale for each output, else sums of groups in float32."""

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        rows = input_rows(x, self._depth)
        out = torch.empty((rows.shape[0], 1), dtype=torch.float32)
        sizes = (rows.shape[0], self._depth, DTYPE_CODES[rows.dtype])
        self._call("row_magnitudes", rows.data_ptr(), rows.stride(0), out.data_ptr(), *sizes)
        return out

    def partial(self, x: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
        rows = input_rows(x, self._depth)
        largest = self.largest(rows) if largest is None else largest
        dtype = torch.int32 if self._are_integers else torch.float32
        sums = torch.empty((rows.shape[0], self._outputs), dtype=dtype)
        self._call(
            f"{self._name}_partial",
            rows.data_ptr(),
            rows.stride(0),
            *self._table,
            largest.data_ptr(),
            sums.data_ptr(),
            rows.shape[0],
            self._outputs,
            *self._sizes,
            DTYPE_CODES[rows.dtype],
        )
        return sums

    def complete(
        self, sums: torch.Tensor, largest: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert largest is not None, "rows became integers by it"
        out = torch.empty(sums.shape, dtype=out_dtype)
        self._call(
            "complete_sums",
            sums.data_ptr(),
            largest.data_ptr(),
            self._table[-1] if self._are_integers else None,
            self._bias,
            out.data_ptr(),
            *sums.shape,
            DTYPE_CODES[out_dtype],
        )
        return out

    @property
    def _are_integers(self) -> bool:
        """True if partial sums are integers: there are no groups, whose scales come first."""
        return len(self._sizes) == 1


def pad_columns(values: torch.Tensor, gate: str | None) -> torch.Tensor:
    """values [O] → float32 with zeros up to the end of the last panel."""
    width = len(values) if gate is None else len(values) // 2
    return torch.nn.functional.pad(values.float(), (0, -width % PANEL))
