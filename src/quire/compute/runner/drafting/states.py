"""Hidden states of the model that outlive their step, for heads that guess tokens from them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.compute.layers import StateTaps
from quire.compute.runner.inputs import ModelInputs
from quire.compute.runner.rows import RowTable, ScheduledRows, Slots
from quire.protocol.step import StepPlan

__all__ = ["KeptStates", "LastStates", "StatePages"]


class KeptStates(Protocol):
    """Keeps states of each forward.

    of_all_tokens: whether forwards give the states of all their tokens. taps: readers of states
    between layers; None for the states after the final norm.
    """

    of_all_tokens: bool
    taps: StateTaps | None

    def keep(
        self, rows: ScheduledRows, inputs: ModelInputs, hidden: torch.Tensor, counts: Slots
    ) -> None:
        """Keep states of a forward of `rows`. hidden [N, E]: after the final norm, of all tokens if
        these were asked for; else of the last `counts` [R] of each row."""
        ...

    def keep_decoded(self, slots: Slots, states: tuple[torch.Tensor, ...]) -> None:
        """Keep the states [R, E] of the last computed token of each row [R]."""
        ...


class LastStates:
    """The states after the final norm of the last tokens that rows have computed: one for each
    that a step verified, since which of them is the last one shows only then.
    """

    def __init__(self, rows: RowTable, width: int, most_drafts: int, dtype: torch.dtype) -> None:
        """most_drafts: most drafts of a row in a step. If there are more, only the last states are
        kept."""
        self.of_all_tokens = False
        self.taps: StateTaps | None = None
        self._rows = rows
        self._room = 1 + most_drafts
        num_slots = len(rows.num_tokens)
        self._states = torch.zeros((num_slots * self._room, width), dtype=dtype)
        self._first = np.full(num_slots, -1, np.int64)  # position of the first kept; none below 0
        self._counts = np.zeros(num_slots, np.int64)

    def apply(self, plan: StepPlan) -> None:
        """Forget the states of rows that are others now, or go on from another place."""
        for slots in (plan.rewind_slot, plan.append_slot, plan.start_fork_dst):
            self._first[slots] = -1
        self._first[[row.slot for row in plan.enter]] = -1
        self._first[[fork.dst for fork in plan.forks]] = -1

    def keep(
        self, rows: ScheduledRows, inputs: ModelInputs, hidden: torch.Tensor, counts: Slots
    ) -> None:
        del inputs
        draws = rows.samples
        slots, kept = rows.slots[draws], np.minimum(counts[draws], self._room)
        lasts = np.cumsum(counts)[draws]
        self._first[slots] = (rows.num_computed + rows.num_tokens)[draws] - kept
        self._counts[slots] = kept
        places = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
        source = torch.from_numpy(np.repeat(lasts - kept, kept) + places)
        index = torch.from_numpy(np.repeat(slots * self._room, kept) + places)
        self._states.index_copy_(0, index, hidden[source])

    @torch.inference_mode()
    def keep_decoded(self, slots: Slots, states: tuple[torch.Tensor, ...]) -> None:
        (hidden,) = states
        self._first[slots] = self._rows.num_computed[slots] - 1
        self._counts[slots] = 1
        self._states.index_copy_(0, torch.from_numpy(slots * self._room), hidden)

    def has(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return which rows [R] have computed all but their last token, and have the state of the
        one before it."""
        place, rows = self._places(slots), self._rows
        is_there = (self._first[slots] >= 0) & (place >= 0) & (place < self._counts[slots])
        return is_there & (rows.num_computed[slots] + 1 == rows.num_tokens[slots])

    def of(self, slots: Slots) -> torch.Tensor:
        """States [R, E] of the last computed tokens of rows that have them."""
        return self._states[torch.from_numpy(slots * self._room + self._places(slots))]

    def _places(self, slots: Slots) -> Slots:
        return self._rows.num_computed[slots] - 1 - self._first[slots]


class StatePages:
    """States of all computed tokens, in pages beside those of K/V: a block with one number has the
    states of the same tokens. So they are there after a prefix hit, in a fork and in a copy. Blocks
    that were on the host come back without theirs."""

    def __init__(
        self,
        rows: RowTable,
        group: int,
        block_size: int,
        num_blocks: int,
        width: int,
        dtype: torch.dtype,
        taps: StateTaps | None,
    ) -> None:
        """group: layer group of the model whose block tables are followed. width: numbers of all
        states of a token. taps: readers of the states; None for the states after the final norm."""
        self.of_all_tokens = True
        self.taps = taps
        self._rows = rows
        self._group = group
        self._size = block_size
        self._states = torch.zeros((num_blocks * block_size, width), dtype=dtype)
        self._is_lost = np.zeros(num_blocks, np.bool_)

    def apply(self, plan: StepPlan) -> None:
        """Follow a plan's difference, after the rows have."""
        self._is_lost[plan.table_block[plan.table_group == self._group]] = False
        for row in plan.enter:
            first = -(-row.num_computed_tokens // self._size)
            self._is_lost[row.block_tables[self._group][first:]] = False
        self._is_lost[plan.load_dst] = True
        if len(plan.copy_src):
            self._is_lost[plan.copy_dst] = self._is_lost[plan.copy_src]
            pages = self._states.view(len(self._is_lost), -1)
            src, dst = plan.copy_src.astype(np.int64), plan.copy_dst.astype(np.int64)
            pages[torch.from_numpy(dst)] = pages[torch.from_numpy(src)]

    def keep(
        self, rows: ScheduledRows, inputs: ModelInputs, hidden: torch.Tensor, counts: Slots
    ) -> None:
        del counts
        states = (hidden,) if self.taps is None else self.taps.take()
        index = inputs.step.groups[self._group].slot_mapping
        self._copy(index[: int(rows.num_tokens.sum())], states)

    @torch.inference_mode()
    def keep_decoded(self, slots: Slots, states: tuple[torch.Tensor, ...]) -> None:
        self._copy(torch.from_numpy(self._index(slots, self._rows.num_computed[slots] - 1)), states)

    def _copy(self, index: torch.Tensor, states: tuple[torch.Tensor, ...]) -> None:
        first = 0
        for state in states:
            width = state.shape[1]
            self._states[:, first : first + width].index_copy_(0, index, state[: len(index)])
            first += width

    def _index(self, slots: Slots, positions: Slots) -> Slots:
        """Places of tokens [T] of rows [T]."""
        blocks = self._rows.tables[self._group][slots, positions // self._size]
        return blocks * self._size + positions % self._size

    def has(self, slot: int, start: int, end: int) -> bool:
        """Return whether the states of tokens start … end - 1 of a row are there."""
        blocks = self._rows.tables[self._group][slot, start // self._size : -(-end // self._size)]
        return not self._is_lost[blocks].any()

    def of(self, slots: Slots, positions: Slots) -> torch.Tensor:
        """States [T, W] of tokens [T] of rows [T]."""
        return self._states[torch.from_numpy(self._index(slots, positions))]
