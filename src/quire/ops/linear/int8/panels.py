"""Matrices of integers that are cut by their inputs, over csrc/linear/integers/int.h."""

from __future__ import annotations

import torch

from quire.ops.linear.plain.cpu_matrix import CpuMatrix
from quire.ops.native.cpu_provider import DTYPE_CODES, PANEL, input_rows

__all__ = ["PartialPanels", "pad_columns"]


class PartialPanels(CpuMatrix):
    """A `CpuMatrix` of integers that is a `PartialMatrix` too, by the kernel `<name>_partial`:
    integers with one scale for each output, else sums of groups in float32. Its last buffer is the
    scale, float32 [O], padded like the bias by `pad_columns`, and the last of its sizes the block
    of inputs that is rotated, 1 for none."""

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        rows = input_rows(x, self._depth)
        out = torch.empty((rows.shape[0], 1), dtype=torch.float32)
        sizes = (rows.shape[0], self._depth, self._sizes[-1], DTYPE_CODES[rows.dtype])
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
            *self._weights,
            largest.data_ptr(),
            sums.data_ptr(),
            rows.shape[0],
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
            self._weights[-1] if self._are_integers else None,
            self._bias,
            out.data_ptr(),
            *sums.shape,
            DTYPE_CODES[out_dtype],
        )
        return out

    @property
    def _are_integers(self) -> bool:
        """True if partial sums are integers: there are no groups, whose scales come first."""
        return len(self._sizes) == 3


def pad_columns(values: torch.Tensor, gate: str | None) -> torch.Tensor:
    """values [O] → float32 with zeros up to the end of the last panel."""
    width = len(values) if gate is None else len(values) // 2
    return torch.nn.functional.pad(values.float(), (0, -width % PANEL))
