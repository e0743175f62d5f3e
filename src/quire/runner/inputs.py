"""From rows to the tensors of one flat batch, without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention import AttentionBackend, GroupInputs, KVPool, StepInputs
from quire.runner.rows import RowTable, ScheduledRows

__all__ = ["InputBuilder", "ModelInputs"]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """token_ids int32 [T], positions int64 [T], last_token int64 [R]: index in the batch of each
    row's last token."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    last_token: torch.Tensor
    step: StepInputs


class InputBuilder:
    """windows: per layer group. block_size: tokens per block."""

    def __init__(
        self,
        rows: RowTable,
        kv: KVPool,
        backend: AttentionBackend,
        windows: Sequence[int | None],
        block_size: int,
    ) -> None:
        self._rows = rows
        self._kv = kv
        self._backend = backend
        self._windows = tuple(windows)
        self._block_size = block_size

    def build(self, scheduled: ScheduledRows) -> ModelInputs:
        """The batch of the scheduled rows, in their order."""
        rows, counts = self._rows, scheduled.num_tokens
        query_start_loc = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        seq_lens = scheduled.num_computed + counts
        if len(counts) == query_start_loc[-1]:  # one token each
            slots, positions = scheduled.slots, scheduled.num_computed
        else:
            slots = np.repeat(scheduled.slots, counts)
            shift = scheduled.num_computed - query_start_loc[:-1]
            positions = np.arange(query_start_loc[-1]) + np.repeat(shift, counts)
        starts = torch.from_numpy(query_start_loc)
        lengths = torch.from_numpy(seq_lens.astype(np.int32))
        num_blocks = -(-int(seq_lens.max()) // self._block_size)
        groups = tuple(
            self._group(group, scheduled, slots, positions, num_blocks, starts, lengths)
            for group in range(len(self._windows))
        )
        step = StepInputs(
            query_start_loc=starts,
            seq_lens=lengths,
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            groups=groups,
            kv=self._kv,
        )
        return ModelInputs(
            token_ids=torch.from_numpy(rows.token_ids[slots, positions]),
            positions=torch.from_numpy(positions),
            last_token=torch.from_numpy(query_start_loc[1:].astype(np.int64) - 1),
            step=step,
        )

    def _group(
        self,
        group: int,
        scheduled: ScheduledRows,
        slots: np.ndarray,
        positions: np.ndarray,
        num_blocks: int,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> GroupInputs:
        table = self._rows.tables[group]
        blocks = table[slots, positions // self._block_size].astype(np.int64)
        slot_mapping = blocks * self._block_size + positions % self._block_size
        block_table = torch.from_numpy(table[scheduled.slots, :num_blocks])
        window = self._windows[group]
        return GroupInputs(
            block_table=block_table,
            slot_mapping=torch.from_numpy(slot_mapping),
            window=window,
            plan=self._backend.plan(query_start_loc, seq_lens, block_table, window),
        )
