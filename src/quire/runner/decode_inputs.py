"""The inputs of decode steps, gathered by kernels, so that a captured step gathers its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.attention import AttentionBackend, GroupInputs, KVPool, StepInputs
from quire.runner.inputs import ModelInputs
from quire.runner.rows import RowTable

__all__ = ["DecodeInputs", "RowTensors"]


@dataclass(frozen=True, slots=True)
class RowTensors:
    """The rows where kernels read them: num_computed int64 [N], token_ids int32 [N, L], and per
    layer group tables int32 [N, M]."""

    num_computed: torch.Tensor
    token_ids: torch.Tensor
    tables: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, rows: RowTable) -> RowTensors:
        """Over the memory of the host's rows."""
        return cls(
            torch.from_numpy(rows.num_computed),
            torch.from_numpy(rows.token_ids),
            tuple(torch.from_numpy(table) for table in rows.tables),
        )


class DecodeInputs:
    """For steps of 1 to S rows that compute one token each. slots: int64 [S], which rows they are,
    read whenever inputs are gathered. windows, block_size: as of `InputBuilder`. gather: the
    operation `quire.ops.decode_inputs`."""

    def __init__(
        self,
        rows: RowTensors,
        slots: torch.Tensor,
        kv: KVPool,
        backend: AttentionBackend,
        windows: Sequence[int | None],
        block_size: int,
        gather: Callable[..., None],
    ) -> None:
        self._rows = rows
        self._slots = slots
        self._kv = kv
        self._backend = backend
        self._windows = tuple(windows)
        self._block_size = block_size
        self._gather = gather
        self._device = slots.device
        self._starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=self._device)

    def gather(self, num_rows: int) -> ModelInputs:
        """Inputs of the first `num_rows` slots; longest lengths in it are the largest possible."""
        slots, starts = self._slots[:num_rows], self._starts[: num_rows + 1]
        token_ids, seq_lens = (self._empty(num_rows, dtype=torch.int32) for _ in range(2))
        positions = self._empty(num_rows, dtype=torch.int64)
        groups: list[GroupInputs] = []
        for blocks, window in zip(self._rows.tables, self._windows, strict=True):
            slot_mapping = self._empty(num_rows, dtype=torch.int64)
            table = self._empty(num_rows, blocks.shape[1], dtype=torch.int32)
            self._gather(
                slots,
                self._rows.num_computed,
                self._rows.token_ids,
                blocks,
                self._block_size,
                token_ids,
                positions,
                seq_lens,
                slot_mapping,
                table,
            )
            plan = self._backend.plan(starts, seq_lens, table, window)
            groups.append(GroupInputs(table, slot_mapping, window, plan))
        longest = self._rows.token_ids.shape[1]
        step = StepInputs(starts, seq_lens, 1, longest, tuple(groups), self._kv)
        return ModelInputs(token_ids, positions, last_token=starts[:-1], step=step)

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)
