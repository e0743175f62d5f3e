"""The inputs of steps with any number of tokens per row, gathered on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.attention import AttentionBackend, GroupInputs, KVPool, StepInputs
from quire.runner.device_state import DeviceState
from quire.runner.inbox import RowList
from quire.runner.inputs import ModelInputs
from quire.runner.rows import ScheduledRows

__all__ = ["DeviceInputs", "TokenBuffers"]


class TokenBuffers:
    """What a model takes per token: token_ids int32 [T], positions int64 [T], and per layer group
    slot_mapping int64 [T]."""

    def __init__(self, num_tokens: int, num_groups: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros((num_groups, num_tokens), dtype=torch.int64, device=device)


class DeviceInputs:
    """windows, block_size: as of `InputBuilder`. gather: the operation `quire.ops.step_inputs`."""

    def __init__(
        self,
        state: DeviceState,
        kv: KVPool,
        backend: AttentionBackend,
        windows: Sequence[int | None],
        block_size: int,
        gather: Callable[..., None],
    ) -> None:
        self._state = state
        self._kv = kv
        self._backend = backend
        self._windows = tuple(windows)
        self._block_size = block_size
        self._gather = gather

    def buffers(self, num_tokens: int) -> TokenBuffers:
        """For steps of so many tokens, padding included."""
        return TokenBuffers(num_tokens, len(self._windows), self._state.arena.device)

    def fill(self, rows: ScheduledRows, tokens: TokenBuffers) -> ModelInputs:
        """The batch of the scheduled rows, in their order, in buffers with room for their tokens;
        what is left is padding. Brings the device's rows up to date."""
        starts = np.zeros(len(rows.slots) + 1, np.int32)
        np.cumsum(rows.num_tokens, out=starts[1:])
        self._state.send(RowList(rows.slots, starts, rows.slots[rows.samples]))
        return self._gathered(rows, tokens)

    def _gathered(self, rows: ScheduledRows, tokens: TokenBuffers) -> ModelInputs:
        num_rows, device = len(rows.slots), self._state.arena.device
        slots = self._state.inbox.slots[:num_rows]
        query_start_loc = self._state.inbox.starts[: num_rows + 1]
        seq_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
        groups: list[GroupInputs] = []
        row_tensors = self._state.row_tensors
        for group, (blocks, window) in enumerate(
            zip(row_tensors.tables, self._windows, strict=True)
        ):
            table = torch.empty((num_rows, blocks.shape[1]), dtype=torch.int32, device=device)
            slot_mapping = tokens.slot_mapping[group]
            self._gather(
                slots,
                query_start_loc,
                row_tensors.num_computed,
                row_tensors.token_ids,
                blocks,
                self._block_size,
                tokens.token_ids,
                tokens.positions,
                seq_lens,
                slot_mapping,
                table,
            )
            plan = self._backend.plan(query_start_loc, seq_lens, table, window)
            groups.append(GroupInputs(table, slot_mapping, window, plan))
        step = StepInputs(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            max_query_len=int(rows.num_tokens.max()),
            max_seq_len=int((rows.num_computed + rows.num_tokens).max()),
            groups=tuple(groups),
            kv=self._kv,
        )
        last_token = query_start_loc[1:].long() - 1
        return ModelInputs(tokens.token_ids, tokens.positions, last_token, step)
