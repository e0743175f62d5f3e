"""The inputs of decode steps, always at the same addresses, so that a captured step finds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.attention import AttentionBackend, GroupInputs, KVPool, StepInputs
from quire.runner.inputs import ModelInputs
from quire.runner.rows import RowTable, ScheduledRows

__all__ = ["DecodeInputs"]


class DecodeInputs:
    """For steps of 1 to `max_rows` rows that compute one token each. windows, block_size: as of
    `InputBuilder`. Row i of every buffer belongs to the i-th scheduled row."""

    def __init__(
        self,
        rows: RowTable,
        kv: KVPool,
        backend: AttentionBackend,
        windows: Sequence[int | None],
        block_size: int,
        max_rows: int,
    ) -> None:
        self._rows = rows
        self._kv = kv
        self._backend = backend
        self._windows = tuple(windows)
        self._block_size = block_size
        self._token_ids = np.zeros(max_rows, np.int64)
        self._positions = np.zeros(max_rows, np.int64)
        self._seq_lens = np.zeros(max_rows, np.int32)
        self._slot_mappings = [np.zeros(max_rows, np.int64) for _ in windows]
        self._tables = [np.zeros((max_rows, table.shape[1]), np.int32) for table in rows.tables]

    def fill(self, scheduled: ScheduledRows) -> None:
        """Write the inputs of these rows [R]."""
        rows, slots, positions = self._rows, scheduled.slots, scheduled.num_computed
        num_rows, size = len(slots), self._block_size
        self._token_ids[:num_rows] = rows.token_ids[slots, positions]
        self._positions[:num_rows] = positions
        self._seq_lens[:num_rows] = positions + 1
        blocks, offsets = np.divmod(positions, size)
        num_blocks = int(blocks.max()) + 1
        for of_rows, table, slot_mapping in zip(
            rows.tables, self._tables, self._slot_mappings, strict=True
        ):
            table[:num_rows, :num_blocks] = of_rows[slots, :num_blocks]
            slot_mapping[:num_rows] = of_rows[slots, blocks].astype(np.int64) * size + offsets

    def views(self, num_rows: int) -> ModelInputs:
        """What `fill` writes for `num_rows` rows; lengths in it are the largest possible."""
        query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32)
        seq_lens = torch.from_numpy(self._seq_lens[:num_rows])
        groups: list[GroupInputs] = []
        for window, table, slot_mapping in zip(
            self._windows, self._tables, self._slot_mappings, strict=True
        ):
            block_table = torch.from_numpy(table[:num_rows])
            groups.append(
                GroupInputs(
                    block_table=block_table,
                    slot_mapping=torch.from_numpy(slot_mapping[:num_rows]),
                    window=window,
                    plan=self._backend.plan(query_start_loc, seq_lens, block_table, window),
                )
            )
        step = StepInputs(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            max_query_len=1,
            max_seq_len=self._rows.token_ids.shape[1],
            groups=tuple(groups),
            kv=self._kv,
        )
        return ModelInputs(
            token_ids=torch.from_numpy(self._token_ids[:num_rows]),
            positions=torch.from_numpy(self._positions[:num_rows]),
            last_token=torch.arange(num_rows),
            step=step,
        )
