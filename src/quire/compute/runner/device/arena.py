"""The rows of live sequences in the memory of a device: one arena of 32-bit words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import EngineError

__all__ = ["ColumnSpec", "DeviceArena", "Words"]

_WORD = 4
_MAX_WORDS = 2**31 - 1
"""Words are named by int32."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """dtype: a type of 4 or 8 bytes. width: elements per slot; None for a column without a second
    axis."""

    dtype: torch.dtype
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Words:
    """Words of the arena and what they become; int32 [N] each."""

    indices: npt.NDArray[np.int32]
    values: npt.NDArray[np.int32]


class DeviceArena:
    """Named columns, one entry per slot, each a view of the arena, so that one scatter of words
    (`quire.ops.rows.apply_updates`) changes any of them. Zero at first.

    all_words: int32 [W].
    """

    def __init__(
        self, columns: Mapping[str, ColumnSpec], num_slots: int, device: torch.device
    ) -> None:
        """Raises EngineError if there would be more words than int32 can name."""
        self._columns = dict(columns)
        self._starts: dict[str, int] = {}
        total = 0
        for name, column in self._columns.items():
            self._starts[name] = total
            total += num_slots * (column.width or 1) * column.dtype.itemsize // _WORD
            total += -total % 2  # 8-byte columns are aligned
        if total > _MAX_WORDS:
            raise EngineError(
                f"the rows of {num_slots} sequences would take {total} words of the device: "
                "lower max_num_seqs or max_model_len"
            )
        self.all_words = torch.zeros(total, dtype=torch.int32, device=device)
        self._num_slots = num_slots

    def view(self, name: str) -> torch.Tensor:
        """[slots] or [slots, width]."""
        column = self._columns[name]
        size = self._num_slots * (column.width or 1) * column.dtype.itemsize // _WORD
        flat = self.all_words[self._starts[name] :][:size].view(column.dtype)
        return flat if column.width is None else flat.view(self._num_slots, column.width)

    def start(self, name: str) -> int:
        """The word at which a column begins."""
        return self._starts[name]

    def words(
        self,
        name: str,
        slots: npt.NDArray[np.int64] | int,
        values: np.ndarray,
        places: npt.NDArray[np.integer[Any]] | int = 0,
    ) -> Words:
        """Return the words that set entries `places` of rows `slots` [N] to `values` [N]; slots and
        places broadcast."""
        column = self._columns[name]
        count = column.dtype.itemsize // _WORD
        elements = (np.asarray(slots) * (column.width or 1) + places) * count + self._starts[name]
        indices = elements[..., None] + np.arange(count)
        typed = np.ascontiguousarray(values, _NUMPY_TYPES[column.dtype])
        return Words(indices.reshape(-1).astype(np.int32), typed.reshape(-1).view(np.int32))


_NUMPY_TYPES = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float64: np.dtype(np.float64),
}
