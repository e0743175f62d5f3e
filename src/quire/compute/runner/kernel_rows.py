"""The rows where kernels read them: the host's own, or a copy in the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.compute.runner.rows import KERNEL_COLUMNS, RowTable, Slots

__all__ = ["KernelRows", "RowList"]


@dataclass(frozen=True, slots=True)
class RowList:
    """The rows of a batch. slots: int64 [R]. starts: int32 [R + 1], where their tokens begin.
    drawing: int64 [N], those of them that draw."""

    slots: Slots
    starts: np.ndarray
    drawing: Slots


@dataclass(frozen=True, slots=True)
class KernelRows:
    """Columns of all slots, and the rows that a step computes, in memory that stays.

    num_computed, num_tokens, num_prompt, adapter, position_offset, second_start (`KERNEL_COLUMNS`):
    int64 [S].
    token_ids: int32 [S, L]. tables: int32 [S, M] per layer group. slots: int64 [R], starts: int32
    [R + 1]; both of a step's rows (`RowList`). spare: the slot of the row that pads steps, -1 if
    none.
    """

    num_computed: torch.Tensor
    num_tokens: torch.Tensor
    num_prompt: torch.Tensor
    adapter: torch.Tensor
    position_offset: torch.Tensor
    second_start: torch.Tensor
    token_ids: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    starts: torch.Tensor
    spare: int

    @classmethod
    def of_host(cls, rows: RowTable) -> KernelRows:
        """Over the memory of the host's rows."""
        num_slots = len(rows.num_tokens)
        return cls(
            token_ids=torch.from_numpy(rows.token_ids),
            tables=tuple(torch.from_numpy(table) for table in rows.tables),
            slots=torch.zeros(num_slots, dtype=torch.int64),
            starts=torch.zeros(num_slots + 1, dtype=torch.int32),
            spare=-1,
            **{name: torch.from_numpy(getattr(rows, name)) for name in KERNEL_COLUMNS},
        )

    def send(self, rows: RowList | None) -> None:
        """Say which rows compute next, where this memory is the host's; None changes nothing."""
        if rows is not None:
            self.slots.numpy()[: len(rows.slots)] = rows.slots
            self.starts.numpy()[: len(rows.starts)] = rows.starts
