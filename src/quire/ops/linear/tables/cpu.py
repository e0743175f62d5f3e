"""`linear_tables` by the C++ kernel (csrc/linear/linear_tables.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from quire.ops.linear.plain import PackedMatrix
from quire.ops.linear.plain.contract import refuse_rows
from quire.ops.linear.tables.contract import Added, Tables, check_arguments
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import (
    DTYPE_CODES,
    PANEL,
    input_rows,
    packed_columns,
    pointer,
    row_ids,
    row_stride,
)
from quire.ops.native.replay import KernelCall
from quire.ops.native.weight_arena import WeightArena
from quire.ops.pointwise.activation.cpu import APART, gate_code

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., PackedMatrix]:
    """`linear_tables` on `library`; contract in `quire.ops.linear.tables`."""
    return partial(_CpuTables, library, WeightArena())


class _CpuTables:
    """Codes and scales in panels of output columns."""

    def __init__(
        self,
        library: NativeLibrary,
        arena: WeightArena,
        weight: Tables,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        gate: str | None = None,
    ) -> None:
        check_arguments(weight, bias, gate)
        self._library, self._call = library, library.call
        self._outputs, self._depth = weight.codes.shape
        self._dtype, bits = dtype, weight.bits
        self._gate, self._gate_code = gate, gate_code(gate)
        self._width = self._outputs if gate is None else self._outputs // 2
        blocks = weight.scale.shape[1]
        row_bytes = self._depth * bits // 8 + blocks * weight.scale.itemsize
        packed = arena.zeros(packed_columns(self._outputs, gate) * row_bytes)
        codes, scale = weight.codes.contiguous(), weight.scale.contiguous()
        self._call(
            "linear_tables_pack",
            codes.data_ptr(),
            scale.data_ptr(),
            packed.data_ptr(),
            self._outputs,
            blocks,
            weight.block_size,
            bits,
            self._gate_code,
        )
        places = _Places.of(self._outputs, self._width, panel_width(library.isa))
        own = len(weight.table) > 1
        tables = places.tables(weight.table) if own else weight.table.clone()
        added = None if weight.added is None else places.numbers(weight.added)
        self._bias = None if bias is None else bias.float().contiguous()
        self._kept = (packed, tables, *(added or (None, None, None)))
        self._pointers = [pointer(part) for part in self._kept]
        self._sizes = (self._outputs, blocks, weight.block_size, bits, int(own))

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

    def call_into(self, x: torch.Tensor, out: torch.Tensor) -> KernelCall:
        """Return the kernel call of `into` for rows x with contiguous elements."""
        return self._library.record("linear_tables", self._arguments(x, out, self._gate_code))

    def _into(self, x: torch.Tensor, out: torch.Tensor, gate: int) -> None:
        rows = input_rows(x, self._depth)
        self._call("linear_tables", *self._arguments(rows, out, gate))

    def _arguments(
        self, rows: torch.Tensor, out: torch.Tensor, gate: int
    ) -> tuple[int | None, ...]:
        return (
            rows.data_ptr(),
            rows.stride(0),
            *self._pointers,
            pointer(self._bias),
            out.data_ptr(),
            row_stride(out),
            rows.shape[0],
            *self._sizes,
            DTYPE_CODES[rows.dtype],
            DTYPE_CODES[out.dtype],
            DTYPE_CODES[self._dtype],
            gate,
        )

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        refuse_rows(self._gate)
        ids = row_ids(ids)
        out = torch.empty((*ids.shape, self._depth), dtype=self._dtype)
        self._call(
            "linear_tables_rows",
            *self._pointers,
            ids.data_ptr(),
            ids.itemsize,
            out.data_ptr(),
            ids.numel(),
            *self._sizes,
            DTYPE_CODES[self._dtype],
        )
        return out


def panel_width(isa: str) -> int:
    """Output columns of a panel of an instruction set (csrc/linear/panels.h)."""
    return PANEL if isa != "avx2" else PANEL // 2


class _Places(NamedTuple):
    """Places of outputs in panels (csrc/pointwise/gate.h). panel, column: int64 [O].
    width: of a panel."""

    panel: torch.Tensor
    column: torch.Tensor
    width: int
    num_panels: int

    @classmethod
    def of(cls, outputs: int, half: int, width: int) -> _Places:
        """half: columns of the result. The panels of a gated layer come in pairs."""
        output, halves = torch.arange(outputs), outputs // half
        panel = output % half // width * halves + output // half
        return cls(panel, output % half % width, width, halves * -(-half // width))

    def tables(self, table: torch.Tensor) -> torch.Tensor:
        """Tables [O, entries] of outputs → [panels, entries, width]."""
        found = table.new_zeros(self.num_panels, self.width, table.shape[1])
        found[self.panel, self.column] = table
        return found.transpose(1, 2).contiguous()

    def numbers(self, added: Added) -> _PanelNumbers | None:
        """Return the added numbers in the order of panels and places; None if there are none."""
        if not len(added.numbers):
            return None
        panel = self.panel[added.rows]
        place = added.columns * self.width + self.column[added.rows]
        order = place.argsort(stable=True)
        order = order[panel[order].argsort(stable=True)]
        counts = panel.bincount(minlength=self.num_panels)
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return _PanelNumbers(ends, place[order].to(torch.int32), added.numbers[order].contiguous())


class _PanelNumbers(NamedTuple):
    """Added numbers by panel. ends: int64 [panels + 1], of each panel's; places: int32 [N], input ·
    width + column; numbers: float32 [N]."""

    ends: torch.Tensor
    places: torch.Tensor
    numbers: torch.Tensor
