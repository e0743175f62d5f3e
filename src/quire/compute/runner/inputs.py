"""Gathers rows into the tensors of one flat batch, without a loop over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.compute.attention import AttentionBackend, GroupInputs, KVPool, StepInputs
from quire.compute.layers import TokenColumns
from quire.compute.layers.token_columns import TYPE_COLUMN, Variant
from quire.compute.runner.kernel_rows import KernelRows, RowList
from quire.compute.runner.rows import ScheduledRows, Slots
from quire.compute.runner.states import RecurrentStates
from quire.config.kv_layout import KVGroup

__all__ = ["BatchBuffers", "InputGatherer", "ModelInputs"]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """token_ids int32 [T], positions int64 [T] or [3, T], last_token int64 [R]: index in the batch
    of each row's last token."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    last_token: torch.Tensor
    step: StepInputs


@dataclass(frozen=True, slots=True)
class BatchBuffers:
    """Memory in which a batch is gathered. token_ids int32 [T], positions int64 [T], seq_lens int32
    [R]; per layer group slot_mapping int64 [T] and tables int32 [R, M]. columns: values of each
    token's row that layers read, int64 [T], by name. last_keys: int32 [T] per layer group
    (`GroupInputs`); empty for causal attention."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: tuple[torch.Tensor, ...]
    tables: tuple[torch.Tensor, ...]
    columns: Mapping[str, torch.Tensor]
    last_keys: tuple[torch.Tensor, ...] = ()

    def of_size(self, num_tokens: int, num_rows: int) -> BatchBuffers:
        """The first tokens and rows of these buffers."""
        return BatchBuffers(
            self.token_ids[:num_tokens],
            self.positions[:num_tokens],
            self.seq_lens[:num_rows],
            tuple(slots[:num_tokens] for slots in self.slot_mapping),
            tuple(table[:num_rows] for table in self.tables),
            {name: values[:num_tokens] for name, values in self.columns.items()},
            tuple(keys[:num_tokens] for keys in self.last_keys),
        )


class InputGatherer:
    """Gathers by kernels out of the rows that these read."""

    def __init__(
        self,
        rows: KernelRows,
        send: Callable[[RowList | None], None],
        kv: KVPool,
        backends: Sequence[AttentionBackend],
        groups: Sequence[KVGroup],
        decode_inputs: Callable[..., None],
        step_inputs: Callable[..., None],
        columns: TokenColumns,
        *,
        whole_prompts: bool = False,
        position_axes: int = 1,
        values: Callable[[str, Slots], Slots] | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        """send: passes the rows that compute next, and brings what kernels read up to date.
        backends: backend of each layer group. decode_inputs, step_inputs: the operations. columns:
        columns that the model's layers read. whole_prompts: tokens of a prompt see all of it, and a
        step that computes one of them computes all. position_axes: see `ModelSpec`; 1 if the
        position of a token is its index. values: `RowTable.values`; None to gather optional columns
        in every step. states: recurrent states of the rows; None if the model has none."""
        self._rows = rows
        self._values = values
        self._states = states
        self._send = send
        self._kv = kv
        self._backends = tuple(backends)
        self._groups = tuple(groups)
        self._decode_inputs = decode_inputs
        self._step_inputs = step_inputs
        self._columns = columns
        self._whole_prompts = whole_prompts
        self._has_offsets = position_axes > 1
        device = rows.slots.device
        self._one_each = torch.arange(len(rows.starts), dtype=torch.int32, device=device)
        self._host_starts = np.arange(len(rows.starts), dtype=np.int32)

    @property
    def variant(self) -> Variant:
        """The optional columns that forwards of the rows that were sent read."""
        return self._columns.variant

    @property
    def variants(self) -> Sequence[Variant]:
        """All that there may be."""
        return self._columns.variants

    @property
    def are_apart(self) -> bool:
        """True if rows that were sent are computed call by call, whatever is captured."""
        return self._columns.are_apart

    def choose(self, variant: Variant) -> None:
        """Make the next forwards use a variant, until rows are sent."""
        self._columns.choose(variant)

    @property
    def longest(self) -> int:
        """Longest possible sequence, in tokens."""
        return self._rows.token_ids.shape[1]

    def send(self, rows: ScheduledRows) -> None:
        """Say which rows compute next."""
        if (values := self._values) is not None:
            self._columns.choose_for(lambda name: values(name, rows.slots))
        starts = self._host_starts[: len(rows.slots) + 1]
        if len(rows.slots) != rows.num_tokens.sum():
            starts = np.zeros(len(rows.slots) + 1, np.int32)
            np.cumsum(rows.num_tokens, out=starts[1:])
        self._send(RowList(rows.slots, starts, rows.slots[rows.samples]))

    def decode(self, num_rows: int) -> ModelInputs:
        """Return the batch of the first `num_rows` rows that were sent, each of which computes one
        token, without asking the host. The longest length in it is the largest possible one. Each
        token is the last of its row, so no key follows it."""
        rows, starts = self._rows, self._one_each[: num_rows + 1]
        batch = self._buffers(num_rows, num_rows, torch.empty)
        columns = (rows.slots[:num_rows], rows.num_computed, rows.token_ids)
        for group, blocks, slots, table in zip(
            self._groups, rows.tables, batch.slot_mapping, batch.tables, strict=True
        ):
            written = (batch.token_ids, batch.positions, batch.seq_lens, slots, table)
            self._decode_inputs(*columns, blocks, group.tokens_per_block, *written)
        if self._has_offsets:
            batch.positions.add_(rows.position_offset[rows.slots[:num_rows]])
        gathered = self._columns.gather(lambda name: getattr(rows, name), rows.slots[:num_rows])
        step = self.step_of(replace(batch, columns=gathered), starts, 1, self.longest, keeps=False)
        return ModelInputs(batch.token_ids, batch.positions, starts[:-1], step)

    def buffers(self, num_tokens: int, num_rows: int, *, empty: bool = False) -> BatchBuffers:
        """Return buffers for so many tokens, padding included, and rows; zero unless `empty`."""
        make = torch.empty if empty else torch.zeros
        batch = self._buffers(num_tokens, num_rows, make)
        if not self._whole_prompts:
            return batch
        last_keys = tuple(
            make(num_tokens, dtype=torch.int32, device=batch.positions.device) for _ in self._groups
        )
        return replace(batch, last_keys=last_keys)

    def _buffers(
        self, num_tokens: int, num_rows: int, make: Callable[..., torch.Tensor]
    ) -> BatchBuffers:
        tables, device = self._rows.tables, self._rows.slots.device
        return BatchBuffers(
            make(num_tokens, dtype=torch.int32, device=device),
            make(num_tokens, dtype=torch.int64, device=device),
            make(num_rows, dtype=torch.int32, device=device),
            tuple(make(num_tokens, dtype=torch.int64, device=device) for _ in tables),
            tuple(
                make((num_rows, table.shape[1]), dtype=torch.int32, device=device)
                for table in tables
            ),
            {
                name: make(num_tokens, dtype=torch.int64, device=device)
                for name in self._columns.names
            },
        )

    def fill(self, rows: ScheduledRows, batch: BatchBuffers) -> ModelInputs:
        """Return the batch of the scheduled rows, in their order. Its buffers have room for all
        their tokens; the rest is padding."""
        self.send(rows)
        source, num_rows = self._rows, len(rows.slots)
        starts = source.starts[: num_rows + 1]
        columns = (source.slots[:num_rows], starts, source.num_computed, source.token_ids)
        for group, blocks, slots, table in zip(
            self._groups, source.tables, batch.slot_mapping, batch.tables, strict=True
        ):
            written = (batch.token_ids, batch.positions, batch.seq_lens, slots, table)
            self._step_inputs(*columns, blocks, group.tokens_per_block, *written)
        if batch.last_keys:
            self._fill_last_keys(columns[0], starts, batch)
        if batch.columns or self._has_offsets:
            num_tokens = int(rows.num_tokens.sum())
            counts = starts.diff().long()

            def of_tokens(column: torch.Tensor) -> torch.Tensor:
                return column[columns[0]].repeat_interleave(counts, output_size=num_tokens)

            for name in self._columns.read:
                if name == TYPE_COLUMN:
                    found = batch.positions[:num_tokens] >= of_tokens(source.second_start)
                else:
                    found = of_tokens(getattr(source, name))
                batch.columns[name][:num_tokens] = found
            if self._has_offsets:
                batch.positions[:num_tokens] += of_tokens(source.position_offset)
        longest = int((rows.num_computed + rows.num_tokens).max())
        step = self.step_of(batch, starts, int(rows.num_tokens.max()), longest)
        return ModelInputs(batch.token_ids, batch.positions, starts[1:].long() - 1, step)

    def _fill_last_keys(
        self, slots: torch.Tensor, starts: torch.Tensor, batch: BatchBuffers
    ) -> None:
        """last_keys [T]: the end of the prompt for tokens within it, else the position [T]; a
        window reaches as far behind a token as before it. slots [R]: the rows' slots. starts [R +
        1]: their first tokens. Those after the last row are padding, read by nobody."""
        positions = batch.positions
        token = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        row = torch.searchsorted(starts[1:], token, right=True).clamp_(max=len(slots) - 1)
        prompt_end = self._rows.num_prompt[slots][row] - 1
        last = torch.maximum(positions, prompt_end)
        for group, last_key in zip(self._groups, batch.last_keys, strict=True):
            window = group.window
            seen = last if window is None else torch.minimum(last, positions + window - 1)
            last_key.copy_(seen)

    def step_of(
        self,
        batch: BatchBuffers,
        starts: torch.Tensor,
        max_query_len: int,
        max_seq_len: int,
        wanted: torch.Tensor | None = None,
        *,
        keeps: bool = True,
    ) -> StepInputs:
        """Return attention's inputs for a batch whose forward comes next: layers read its columns.
        starts, wanted: `query_start_loc` and `wanted_tokens` of `StepInputs`. keeps: whether rows
        may have drafts."""
        self._columns.set(batch.columns)
        windows = [group.window for group in self._groups]
        last_keys = batch.last_keys or (None,) * len(windows)
        groups = tuple(
            GroupInputs(
                table,
                slots,
                window,
                backend.plan(starts, batch.seq_lens, table, window),
                last_key,
            )
            for backend, table, slots, window, last_key in zip(
                self._backends, batch.tables, batch.slot_mapping, windows, last_keys, strict=True
            )
        )
        states = self._states
        if states is not None:
            states = states.inputs(self._slots_of(starts), keeps=keeps)
        return StepInputs(
            starts,
            batch.seq_lens,
            max_query_len,
            max_seq_len,
            groups,
            self._kv,
            wanted,
            states=states,
        )

    def _slots_of(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the slots of the rows that were sent, whose tokens begin at `starts`."""
        return self._rows.slots[: len(starts) - 1]
