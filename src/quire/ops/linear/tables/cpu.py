"""`linear_tables` by the C++ kernel (csrc/linear/linear_tables.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from quire.ops.linear.plain import PackedMatrix
from quire.ops.linear.plain.cpu_matrix import CpuMatrix
from quire.ops.linear.tables.contract import Added, Tables, check_arguments
from quire.ops.native.binding import NativeLibrary
from quire.ops.native.cpu_provider import DTYPE_CODES, packed_columns, panel_width
from quire.ops.native.weight_arena import WeightArena
from quire.ops.pointwise.activation.cpu import gate_code

__all__ = ["bind"]


def bind(library: NativeLibrary) -> Callable[..., PackedMatrix]:
    """`linear_tables` on `library`; contract in `quire.ops.linear.tables`."""
    return partial(_pack, library, WeightArena())


def _pack(
    library: NativeLibrary,
    arena: WeightArena,
    weight: Tables,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    gate: str | None = None,
) -> CpuMatrix:
    """Codes and scales in panels of output columns."""
    check_arguments(weight, bias, gate)
    outputs, depth = weight.codes.shape
    bits, blocks = weight.bits, weight.scale.shape[1]
    row_bytes = depth * bits // 8 + blocks * weight.scale.itemsize
    packed = arena.zeros(packed_columns(outputs, gate) * row_bytes)
    codes, scale = weight.codes.contiguous(), weight.scale.contiguous()
    library.call(
        "linear_tables_pack",
        codes.data_ptr(),
        scale.data_ptr(),
        packed.data_ptr(),
        outputs,
        blocks,
        weight.block_size,
        bits,
        gate_code(gate),
    )
    width = outputs if gate is None else outputs // 2
    places = _Places.of(outputs, width, panel_width(library.isa))
    own = len(weight.table) > 1
    tables = places.tables(weight.table) if own else weight.table.clone()
    added = None if weight.added is None else places.numbers(weight.added)
    return CpuMatrix(
        library,
        "linear_tables",
        [packed, tables, *(added or (None, None, None))],
        None if bias is None else bias.float().contiguous(),
        sizes=[outputs, blocks, weight.block_size, bits, int(own)],
        depth=depth,
        dtype=dtype,
        gate=gate,
        codes=[DTYPE_CODES[dtype]],
    )


class _Places(NamedTuple):
    """Places of outputs in panels (csrc/pointwise/gate.h). panel, column: int64 [O].
    width: columns of a panel."""

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
