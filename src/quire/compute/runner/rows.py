"""The data side's memory of live sequences: one persistent row per slot, changed by plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.protocol.pooling_params import Pooling, reads_whole_prompt
from quire.protocol.step import EnterRow, ExtendPrompt, IntArray, MediaSpan, StepPlan

__all__ = ["KERNEL_COLUMNS", "RowTable", "ScheduledRows", "Slots", "places_in_rows"]

Slots = npt.NDArray[np.int64]

KERNEL_COLUMNS = (
    "num_computed",
    "num_tokens",
    "num_prompt",
    "adapter",
    "position_offset",
    "second_start",
)
"""Columns of a `RowTable` that kernels read (`KernelRows`), and that are copied to a device."""

NO_SECOND = 2**31
"""`second_start` of rows without a second text: behind all tokens."""

_FORKED = (*KERNEL_COLUMNS, "standing", "failed")


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Rows that compute in a step. slots, num_computed (before the step), num_tokens, num_drafts
    (the last ones of these tokens, to be verified): int64 [R].

    samples: bool [R], rows whose computed count reaches their total with this step, but for those
    that pool.
    """

    slots: Slots
    num_computed: Slots
    num_tokens: Slots
    num_drafts: Slots
    samples: npt.NDArray[np.bool_]

    def select(self, part: slice | npt.NDArray[np.integer[Any]]) -> ScheduledRows:
        """Some of the rows."""
        return ScheduledRows(*(getattr(self, each.name)[part] for each in fields(self)))


def places_in_rows(slots: npt.NDArray[np.integer[Any]]) -> Slots:
    """Return the place of each token among those of its row; the tokens' `slots` [N] lie row after
    row."""
    firsts = np.r_[True, slots[1:] != slots[:-1]].nonzero()[0]  # where a row's tokens begin
    counts = np.diff(np.r_[firsts, len(slots)])
    return np.arange(len(slots)) - np.repeat(firsts, counts)


class RowTable:
    """The rows own the truth about computed counts and token values; a plan never names an
    absolute position. A step's outcome is committed after sampling, by the last kernel of a step
    that draws itself, so a step can be run again.

    token_ids: int32 [slots, max_model_len + 1]. tables: int32 [slots, max blocks] per layer group.
    num_tokens, num_computed, num_prompt, adapter, standing (tokens per step), num_drafts,
        num_rejected (of these drafts): int64 [slots]. The drafts of a step lie behind the row's
        tokens.
    read_state, write_state: int64 [slots], of 2 · slots places for recurrent states. A step reads
        one and writes the other, however often it is computed; its commit swaps them.
    media: spans of embeddings in prompts, by slot. pooling: method of each row that pools, by slot.
    position_offset: int64 [slots], position minus index of a token after all media.
    second_start: int64 [slots], index of the first token of the second text, if the row is a pair
        of texts that the model tells apart.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        tokens_per_block: Sequence[int],
        *,
        has_states: bool = False,
        position_axes: int = 1,
        token_types: int = 0,
    ) -> None:
        """tokens_per_block: number for each layer group. has_states: rows have recurrent states.
        position_axes, token_types: see `ModelSpec`."""
        self._has_states = has_states
        self._tells_texts_apart = token_types > 1
        self._has_axes = position_axes > 1
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.tables = [
            np.zeros((max_num_seqs, -(-max_model_len // tokens)), np.int32)
            for tokens in tokens_per_block
        ]
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.num_prompt = np.zeros(max_num_seqs, np.int64)
        self.adapter = np.zeros(max_num_seqs, np.int64)
        self.position_offset = np.zeros(max_num_seqs, np.int64)
        self.second_start = np.full(max_num_seqs, NO_SECOND, np.int64)
        self.standing = np.zeros(max_num_seqs, np.int64)
        self.num_drafts = np.zeros(max_num_seqs, np.int64)
        self.num_rejected = np.zeros(max_num_seqs, np.int64)
        self.failed = np.zeros(max_num_seqs, np.bool_)
        self.media: dict[int, tuple[MediaSpan, ...]] = {}
        self.pooling: dict[int, Pooling] = {}
        self.read_state = np.arange(max_num_seqs)
        self.write_state = self.read_state + max_num_seqs

    def apply(self, plan: StepPlan) -> None:
        """Take over a plan's difference, `forks` excepted: they follow the forward."""
        self.standing[plan.leave] = 0
        if self.media:
            for slot in plan.leave.tolist():
                self.media.pop(slot, None)
        if self.pooling:
            for slot in plan.leave.tolist():
                self.pooling.pop(slot, None)
        for row in plan.enter:
            self._enter(row)
        for piece in plan.extend:
            self._extend(piece)
        self._drop_tails(plan)
        for src, dst in zip(plan.start_fork_src, plan.start_fork_dst, strict=True):
            self.fork(int(src), int(dst))
            self.standing[dst] = 0
        self._append_chosen(plan)
        self.update_tables(plan)
        self.standing[plan.delta_slot] = plan.delta_tokens
        self._take_drafts(plan)

    def _take_drafts(self, plan: StepPlan) -> None:
        self.num_drafts[:] = self.num_rejected[:] = 0
        if not len(plan.draft_slot):
            return
        slots = plan.draft_slot.astype(np.int64)
        np.add.at(self.num_drafts, slots, 1)
        places = self.num_tokens[slots] + places_in_rows(slots)
        self.token_ids[slots, places] = plan.draft_token

    def _append_chosen(self, plan: StepPlan) -> None:
        if not len(plan.append_slot):
            return
        slots = plan.append_slot.astype(np.int64)
        places = self.num_tokens[slots] + places_in_rows(slots)
        self.token_ids[slots, places] = plan.append_token
        np.add.at(self.num_tokens, slots, 1)

    def _drop_tails(self, plan: StepPlan) -> None:
        if not len(plan.rewind_slot):
            return
        slots = plan.rewind_slot.astype(np.int64)
        left = self.num_tokens[slots] - plan.rewind_tokens
        if (left < 0).any():
            bad = int(np.argmax(left < 0))
            raise EngineError(
                f"the plan takes {int(plan.rewind_tokens[bad])} tokens from slot "
                f"{int(slots[bad])}, which has {int(self.num_tokens[slots[bad]])}"
            )
        self.num_tokens[slots] = left
        self.num_computed[slots] = np.minimum(self.num_computed[slots], left)

    def values(self, column: str, slots: Slots) -> Slots:
        """Return what rows have in a column."""
        return getattr(self, column)[slots]

    def update_tables(self, plan: StepPlan) -> None:
        """Take over what a plan changes in the block tables of rows that stay."""
        if not len(plan.table_slot):
            return
        for group, table in enumerate(self.tables):
            of_group = plan.table_group == group
            table[plan.table_slot[of_group], plan.table_index[of_group]] = plan.table_block[
                of_group
            ]

    def _enter(self, row: EnterRow) -> None:
        slot, length = row.slot, len(row.token_ids)
        self.token_ids[slot, :length] = row.token_ids
        self.num_tokens[slot] = length
        self.num_computed[slot] = row.num_computed_tokens
        self.num_prompt[slot] = row.num_prompt_tokens
        self.adapter[slot] = row.adapter
        is_pair = row.second_start > 0 and self._tells_texts_apart
        self.second_start[slot] = row.second_start if is_pair else NO_SECOND
        self.standing[slot] = 0
        self.failed[slot] = False
        for table, blocks in zip(self.tables, row.block_tables, strict=True):
            table[slot, : len(blocks)] = blocks
        self._set_media(slot, row.media)
        self._set_pooling(row)
        self.position_offset[slot] = sum(map(self._offset_after, row.media))

    def _set_media(self, slot: int, media: tuple[MediaSpan, ...]) -> None:
        self.media.pop(slot, None)
        if media:
            self.media[slot] = media

    def _set_pooling(self, row: EnterRow) -> None:
        self.pooling.pop(row.slot, None)
        if row.pooling is None:
            return
        if row.num_computed_tokens and reads_whole_prompt(row.pooling):
            raise EngineError(
                f"the plan enters slot {row.slot}, which pools its whole prompt ({row.pooling}), "
                f"after its first {row.num_computed_tokens} tokens"
            )
        self.pooling[row.slot] = row.pooling

    def _offset_after(self, span: MediaSpan) -> int:
        """Return the media's addition to the offset of the text after them."""
        if not (self._has_axes and len(span.positions)):
            return 0
        return int(span.positions.max()) + 1 - span.length

    def positions_on_axes(self, rows: ScheduledRows) -> npt.NDArray[np.int64] | None:
        """Positions [3, T] of the tokens of these rows; None if those of each token are equal, and
        are its index and the offset."""
        if not (self._has_axes and self.reads_media(rows)):
            return None
        ends = rows.num_computed + rows.num_tokens
        spans = zip(rows.slots.tolist(), rows.num_computed.tolist(), ends.tolist(), strict=True)
        return np.concatenate([self._positions_of(*span) for span in spans], axis=1)

    def _positions_of(self, slot: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the positions of tokens start … end - 1 of a row: [3, end - start]."""
        places = np.arange(end)
        found, offset = np.tile(places, (3, 1)), 0
        for span in self.media.get(slot, ()):
            own = found[:, span.position : span.end]  # the last ones may not be computed yet
            if len(span.positions):
                own[:] = span.positions.reshape(3, -1)[:, : own.shape[1]] + span.position
            own += offset
            offset += self._offset_after(span)
            found[:, span.end :] = places[span.end :] + offset
        return found[:, start:]

    def spans_in(self, rows: ScheduledRows) -> Iterator[tuple[MediaSpan, int, int, int]]:
        """Media that these rows compute: each span, its first token in this step and the end of
        them, and the place of the first one in the batch."""
        if not self.reads_media(rows):
            return
        ends = np.cumsum(rows.num_tokens)
        columns = (rows.slots, rows.num_computed, rows.num_tokens, ends - rows.num_tokens)
        for slot, start, count, place in zip(*(each.tolist() for each in columns), strict=True):
            for span in self.media.get(slot, ()):
                first, end = max(span.position, start), min(span.end, start + count)
                if first < end:
                    yield span, first, end, place + first - start

    def last_keys(self, rows: ScheduledRows) -> IntArray | None:
        """Position of the last key that each token of these rows sees, int32 [T]; None if it is its
        own for all of them. Raises EngineError if the step ends within media that are computed
        whole."""
        found: IntArray | None = None
        for span, first, end, place in self.spans_in(rows):
            if not span.is_whole:
                continue
            if end < span.end:
                raise EngineError(
                    f"the step computes tokens up to {end - 1} of media up to {span.end - 1}, of "
                    "which each token sees all"
                )
            if found is None:
                slots = np.repeat(rows.slots, rows.num_tokens)
                starts = np.repeat(rows.num_computed, rows.num_tokens)
                found = (starts + places_in_rows(slots)).astype(np.int32)
            found[place : place + end - first] = span.end - 1
        return found

    def reads_media(self, rows: ScheduledRows) -> bool:
        """Return whether some of these rows have embeddings at or after their first token."""
        return bool(self.media) and any(
            slot in self.media and start < self.media[slot][-1].end
            for slot, start in zip(rows.slots.tolist(), rows.num_computed.tolist(), strict=True)
        )

    def _extend(self, piece: ExtendPrompt) -> None:
        start = int(self.num_tokens[piece.slot])
        self.token_ids[piece.slot, start : start + len(piece.token_ids)] = piece.token_ids
        self.num_tokens[piece.slot] += len(piece.token_ids)
        self.num_prompt[piece.slot] += len(piece.token_ids)

    def scheduled(self) -> ScheduledRows:
        """The rows that compute in this step; rows that failed before wait for their leave."""
        slots = np.flatnonzero((self.standing > 0) & ~self.failed)
        computed, tokens, drafts = (
            self.num_computed[slots],
            self.standing[slots],
            self.num_drafts[slots],
        )
        end = computed + tokens
        if (end > self.num_tokens[slots]).any():
            bad = int(slots[np.argmax(end > self.num_tokens[slots])])
            raise EngineError(
                f"the plan computes up to token {int(self.num_computed[bad] + self.standing[bad])} "
                f"of slot {bad}, which has {int(self.num_tokens[bad])}"
            )
        samples = end == self.num_tokens[slots]
        if self.pooling:
            samples &= ~np.isin(slots, list(self.pooling))
        if (drafts[~samples] > 0).any():
            raise EngineError("the plan has drafts for a row that does not reach its last token")
        return ScheduledRows(slots, computed, tokens + drafts, drafts, samples)

    def cut_prompts(self) -> Slots:
        """Slots of the rows that compute a part of their prompt in this step, and not all."""
        starts_within = (self.num_computed > 0) | (self.standing < self.num_prompt)
        is_cut = (self.num_computed < self.num_prompt) & starts_within
        return np.flatnonzero(is_cut & (self.standing > 0) & ~self.failed)

    def fork(self, src: int, dst: int) -> None:
        """`dst` becomes a copy of `src` as it is now, but for the places of their states: the owner
        of the states copies from one to the other."""
        length = self.num_tokens[src]
        self.token_ids[dst, :length] = self.token_ids[src, :length]
        for table in self.tables:
            table[dst] = table[src]
        for name in _FORKED:
            column = getattr(self, name)
            column[dst] = column[src]
        self._set_media(dst, self.media.get(src, ()))

    def commit_computed(self, rows: ScheduledRows) -> None:
        """The K/V of these rows' tokens are in the cache, those of drafts as if all were right, and
        what they wrote is their state."""
        certain = rows.num_tokens - rows.num_drafts
        self.num_computed[rows.slots] += certain + self.num_drafts[rows.slots]
        self.commit_states(rows.slots)

    def commit_states(self, slots: Slots) -> None:
        """Take what these rows wrote for their state. `commit_computed` does so too; this is for
        steps whose last kernel has committed the rest."""
        if not self._has_states:
            return
        read = self.read_state[slots]
        self.read_state[slots] = self.write_state[slots]
        self.write_state[slots] = read

    def rewind(self, slots: Slots, num_rejected: Slots) -> None:
        """Rows `slots` [N] have computed so many drafts [N] that were not accepted."""
        self.num_computed[slots] -= num_rejected
        self.num_rejected[slots] = num_rejected

    def without_drafts(self, scheduled: ScheduledRows) -> ScheduledRows:
        """These rows as they are computed without their drafts."""
        self.num_drafts[scheduled.slots] = 0
        num_tokens = scheduled.num_tokens - scheduled.num_drafts
        return replace(scheduled, num_tokens=num_tokens, num_drafts=scheduled.num_drafts * 0)

    def accepts(self, slots: Slots, token_ids: IntArray) -> npt.NDArray[np.bool_]:
        """Return which rows [N] with drafts left drew the next draft; call it before `append`."""
        return self.token_ids[slots, self.num_tokens[slots]] == token_ids

    def keep_draft(self, slots: Slots) -> None:
        """The next tokens of rows `slots` [N] are their next drafts."""
        self.num_tokens[slots] += 1

    def append(self, slots: Slots, token_ids: IntArray) -> None:
        """The next tokens of rows `slots` [N] are `token_ids` [N]."""
        self.token_ids[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def prompt_ids(self, slot: int) -> IntArray:
        """View of a row's prompt."""
        return self.token_ids[slot, : self.num_prompt[slot]]

    def output_ids(self, slot: int) -> IntArray:
        """View of a row's tokens after the prompt."""
        return self.token_ids[slot, self.num_prompt[slot] : self.num_tokens[slot]]
