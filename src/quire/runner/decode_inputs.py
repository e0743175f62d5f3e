"""The inputs of decode steps, gathered by kernels, so that a captured step gathers its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.attention import AttentionBackend, GroupInputs, KVPool, StepInputs
from quire.runner.inputs import ModelInputs
from quire.runner.rows import RowTable, Slots

__all__ = ["DecodeInputs"]


class DecodeInputs:
    """For steps of 1 to `max_rows` rows that compute one token each. windows, block_size: as of
    `InputBuilder`. gather: the operation `quire.ops.decode_inputs`."""

    def __init__(
        self,
        rows: RowTable,
        kv: KVPool,
        backend: AttentionBackend,
        windows: Sequence[int | None],
        block_size: int,
        gather: Callable[..., None],
        max_rows: int,
    ) -> None:
        self._num_computed = torch.from_numpy(rows.num_computed)
        self._row_tokens = torch.from_numpy(rows.token_ids)
        self._row_blocks = [torch.from_numpy(table) for table in rows.tables]
        self._kv = kv
        self._backend = backend
        self._windows = tuple(windows)
        self._block_size = block_size
        self._gather = gather
        self._slots = np.zeros(max_rows, np.int64)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32)

    def set_slots(self, slots: Slots) -> None:
        """The rows [R] whose inputs `gather` gathers."""
        self._slots[: len(slots)] = slots

    def gather(self, num_rows: int) -> ModelInputs:
        """Inputs of the first `num_rows` slots; longest lengths in it are the largest possible."""
        slots, starts = torch.from_numpy(self._slots)[:num_rows], self._starts[: num_rows + 1]
        token_ids, seq_lens = (torch.empty(num_rows, dtype=torch.int32) for _ in range(2))
        positions = torch.empty(num_rows, dtype=torch.int64)
        groups: list[GroupInputs] = []
        for blocks, window in zip(self._row_blocks, self._windows, strict=True):
            slot_mapping = torch.empty(num_rows, dtype=torch.int64)
            table = torch.empty((num_rows, blocks.shape[1]), dtype=torch.int32)
            self._gather(
                slots,
                self._num_computed,
                self._row_tokens,
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
        longest = self._row_tokens.shape[1]
        step = StepInputs(starts, seq_lens, 1, longest, tuple(groups), self._kv)
        return ModelInputs(token_ids, positions, last_token=starts[:-1], step=step)
