"""The rows of live sequences on a device, kept like the host's by differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.compute.runner.device.arena import ColumnSpec, DeviceArena, Words
from quire.compute.runner.device.inbox import Inbox
from quire.compute.runner.device.queue import DeviceQueue
from quire.compute.runner.kernel_rows import KernelRows, RowList
from quire.compute.runner.rows import KERNEL_COLUMNS, RowTable, Slots, places_in_rows
from quire.compute.sampling import SamplingState
from quire.compute.sampling.device_columns import DeviceColumns
from quire.protocol.step import RowTokens, StepPlan

__all__ = ["DeviceState"]


class DeviceState:
    """Mirror of the host's rows in the memory of a device.

    The host's rows know all counts and block tables as they will be after the steps that were
    launched, and every token but those of steps whose results have not arrived. These tokens are on
    the device alone. So a plan's changes are copied from the host's rows, in any order, and tokens
    of a row that branches off are copied on the device. One extra row, the spare one, pads steps:
    it computes one token in a block of its own, and nothing of it changes.
    """

    def __init__(
        self,
        rows: RowTable,
        sampling: SamplingState,
        queue: DeviceQueue,
        apply_updates: Callable[..., None],
        spare_block: int,
    ) -> None:
        """apply_updates: the operation. spare_block: a block of the KV pool that no plan names."""
        self._mirror = rows
        self._sampling = sampling
        self._queue = queue
        self._apply_updates = apply_updates
        num_rows, max_tokens = rows.token_ids.shape
        self._tables = [f"table {group}" for group in range(len(rows.tables))]
        columns = {
            **{name: ColumnSpec(torch.int64) for name in KERNEL_COLUMNS},
            "token_ids": ColumnSpec(torch.int32, max_tokens),
            **{
                name: ColumnSpec(torch.int32, table.shape[1])
                for name, table in zip(self._tables, rows.tables, strict=True)
            },
            "sampling": ColumnSpec(torch.int32, DeviceColumns.num_words(1)),
        }
        self._columns = DeviceArena(columns, num_rows + 1, queue.device)
        self.arena = self._columns.all_words
        self.spare = num_rows
        self.inbox = Inbox(queue, num_rows, self.spare)
        view = self._columns.view
        self.rows = KernelRows(
            token_ids=view("token_ids"),
            tables=tuple(view(name) for name in self._tables),
            slots=self.inbox.slots,
            starts=self.inbox.starts,
            spare=self.spare,
            **{name: view(name) for name in KERNEL_COLUMNS},
        )
        self.sampling = DeviceColumns.over(view("sampling").view(-1))
        self.rows.num_tokens[self.spare] = 1
        for table in self.rows.tables:
            table[self.spare] = spare_block
        self._drawn: list[tuple[Slots, Slots]] = []
        self._early: list[Words] = []
        self._late: list[Words] = []
        self._stale = np.zeros(num_rows, np.bool_)

    def take(self, plan: StepPlan) -> None:
        """Note what a plan changed; the mirror has it already."""
        self._note_drawn({row.slot for row in plan.enter})
        for row in plan.enter:
            self._note_tokens(row.slot, 0, len(row.token_ids))
            self._note_table(row.slot, [len(blocks) for blocks in row.block_tables])
        for slot, count in _extended(plan).items():
            end = int(self._mirror.num_tokens[slot])
            self._note_tokens(slot, end - count, end)
        entered = [row.slot for row in plan.enter]
        forked = plan.start_fork_dst.tolist()
        self._note_sampling(entered + forked)
        self._stale[[*entered, *forked, *(piece.slot for piece in plan.extend)]] = True
        self._stale[plan.rewind_slot] = True
        if forked:
            pairs = zip(plan.start_fork_src.tolist(), forked, strict=True)
            self._copy_tokens(list(pairs))
            for slot in forked:
                self._note_table(slot)
        for slot in np.unique(plan.draft_slot).tolist():
            start = int(self._mirror.num_tokens[slot])
            self._note_tokens(slot, start, start + int(self._mirror.num_drafts[slot]))
        appended = plan.append_slot.astype(np.int64)
        if len(appended):
            starts = self._mirror.num_tokens - np.bincount(appended, minlength=len(self._stale))
            at = starts[appended] + places_in_rows(appended)
            self._note("token_ids", appended, self._mirror.token_ids, at)
            self._stale[appended] = True
        for group, name in enumerate(self._tables):
            of_group = plan.table_group == group
            slots, places = plan.table_slot[of_group], plan.table_index[of_group]
            self._note(name, slots.astype(np.int64), self._mirror.tables[group], places)

    def note_drawn(self, drawn: RowTokens) -> None:
        """The host has drawn the last tokens of these rows; the next step reads them."""
        slots, counts = np.repeat(drawn.slots, drawn.counts), drawn.counts
        ends = self._mirror.num_tokens[slots]
        places = np.arange(len(slots)) - np.repeat(np.cumsum(counts), counts)
        self._drawn.append((slots, ends + places))
        self._stale[drawn.slots] = True

    def note_computed(self, slots: Slots) -> None:
        """The mirror has counted what these rows computed; the device has not."""
        self._stale[slots] = True

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Rows branch off after a forward, (source, new row) each; the mirror has them already."""
        self._copy_tokens(pairs)
        slots = [dst for _, dst in pairs]
        for slot in slots:
            self._note_table(slot)
        self._note_sampling(slots)
        self._stale[slots] = True

    def send(self, rows: RowList | None) -> None:
        """Bring all that was noted to the device, and which rows compute next."""
        self._note_counts()
        self._send(rows, self._early + self._late)
        self._early, self._late = [], []

    def _send(self, rows: RowList | None, updates: Sequence[Words]) -> None:
        *others, last = self.inbox.batches(updates)
        for batch in others:
            self._apply(self.inbox.send(None, batch))
        self._apply(self.inbox.send(rows, last))

    def _apply(self, updates: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if updates is not None:
            self._apply_updates(self.arena, *updates)

    def _copy_tokens(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Give rows the tokens of others, one pair after the other."""
        self._send(None, self._early)
        self._early = []
        origins: dict[int, int] = {}
        for src, dst in pairs:
            origins[dst] = origins.get(src, src)
        src = self._queue.upload(np.fromiter(origins.values(), np.int64, len(origins)))
        dst = self._queue.upload(np.fromiter(origins, np.int64, len(origins)))
        tokens = self.rows.token_ids
        tokens.index_copy_(0, dst, tokens.index_select(0, src))

    def _note_drawn(self, entered: set[int]) -> None:
        """Note the tokens that the host has drawn, but for slots that another sequence has entered
        since."""
        for slots, places in self._drawn:
            stays = np.array([slot not in entered for slot in slots.tolist()], np.bool_)
            slots, places = slots[stays], places[stays]
            tokens = self._mirror.token_ids[slots, places]
            self._early.append(self._columns.words("token_ids", slots, tokens, places))
        self._drawn = []

    def _note_tokens(self, slot: int, start: int, end: int) -> None:
        tokens, places = self._mirror.token_ids[slot, start:end], np.arange(start, end)
        self._early.append(self._columns.words("token_ids", slot, tokens, places))

    def _note_table(self, slot: int, counts: Sequence[int] | None = None) -> None:
        """The first `counts` entries of a row's tables, by group; None for all of them."""
        for group, (name, table) in enumerate(zip(self._tables, self._mirror.tables, strict=True)):
            count = table.shape[1] if counts is None else counts[group]
            self._note(name, np.full(count, slot), table, np.arange(count))

    def _note(self, name: str, slots: Slots, mirror: np.ndarray, places: np.ndarray) -> None:
        if len(slots):
            values = mirror[slots, places]
            self._late.append(self._columns.words(name, slots, values, places))

    def _note_sampling(self, slots: Sequence[int]) -> None:
        first = self._columns.start("sampling")
        for slot in slots:
            places, values = DeviceColumns.updates(self._sampling, slot)
            self._late.append(Words((first + places).astype(np.int32), values))

    def _note_counts(self) -> None:
        slots = np.flatnonzero(self._stale)
        if len(slots):
            for name in KERNEL_COLUMNS:
                values = getattr(self._mirror, name)[slots]
                self._late.append(self._columns.words(name, slots, values))
            self._stale[slots] = False


def _extended(plan: StepPlan) -> dict[int, int]:
    """Tokens that prompts go on with, by slot."""
    counts: dict[int, int] = {}
    for piece in plan.extend:
        counts[piece.slot] = counts.get(piece.slot, 0) + len(piece.token_ids)
    return counts
