"""Recovery of preempted groups' K/V: computed again, or swapped to the host and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.base.errors import EngineError
from quire.plan.kv_cache import KVManager, SavedTables
from quire.plan.scheduler.sequence import Sequence, SequenceGroup
from quire.plan.scheduler.table import SequenceTable
from quire.protocol.pooling_params import reads_whole_prompt
from quire.protocol.recovery import RecoveryCosts

__all__ = ["Recovery"]

Slots = npt.NDArray[np.int64]


class Recovery:
    """Decides when a group is preempted, and keeps what it decided on its sequences.

    costs: None computes everything again. Only what the host has room for is swapped. Recurrent
    states wait in checkpoints meanwhile.
    """

    def __init__(
        self,
        table: SequenceTable,
        kv: KVManager,
        costs: RecoveryCosts | None,
        is_entering: Callable[[int], bool],
    ) -> None:
        """is_entering: returns whether a slot's row enters with the next plan."""
        self._table = table
        self._kv = kv
        self._costs = costs
        self._is_entering = is_entering
        self._arrived = set[int]()
        self._swapped_in: set[int] = set()
        self.swapped_out_total = 0
        self.swapped_in_total = 0

    def save(self, group: SequenceGroup) -> None:
        """Swap out a running group whose slots will be taken, if that is cheaper than computing it
        again and the host has room. Groups that want prompt log-probabilities or pool are computed
        again, since values in flight would be lost."""
        request = group.request
        if self._costs is None or request.params.prompt_logprobs is not None:
            return
        if reads_whole_prompt(request.pooling):
            return
        slots = np.array([sequence.slot for sequence in group.sequences], np.int64)
        # The last token is always computed again: it draws, or gives a beam its candidates.
        total = self._table.num_total[slots] - self._table.num_drafted[slots]
        num_tokens = np.minimum(self._table.first_query(slots), total - 1)
        if self._kv.states is not None and not self._has_states(group, slots, num_tokens):
            return
        if not self._costs.prefers_swap(int(num_tokens.sum()), self._num_blocks(num_tokens)):
            return
        stored = self._kv.swaps.swap_out(slots, num_tokens)
        if stored is None:
            return
        self.swapped_out_total += 1
        for sequence, swapped in zip(group.sequences, stored, strict=True):
            sequence.swapped = swapped

    def _has_states(self, group: SequenceGroup, slots: Slots, num_tokens: Slots) -> bool:
        """Return whether the rows of these slots [R] have the states after so many tokens [R]: not
        if drafts are in flight, if a row is still to enter, or to become the copy of another."""
        is_there = (num_tokens == self._table.num_computed[slots]).all()
        return bool(
            is_there and group.beams is None and not any(map(self._is_entering, slots.tolist()))
        )

    def _num_blocks(self, num_tokens: np.ndarray) -> int:
        """Return the upper bound on blocks to copy; sharing and windows lower it."""
        return sum(self._kv.layout.blocks_for(count) for count in num_tokens.tolist())

    def plan_swap_in(self, group: SequenceGroup, budget: int) -> list[int]:
        """Tokens that each sequence may compute in the step in which it comes back."""
        counts: list[int] = []
        for sequence in group.sequences:
            start = _swapped(sequence).num_tokens
            end = min(len(sequence.token_ids) - group.request.is_open, start + budget)
            counts.append(group.stop_of(start, end) - start)
            budget -= counts[-1]
        return counts

    def num_blocks_to_swap_in(self, group: SequenceGroup, counts: list[int]) -> int:
        """Blocks that must be available for `swap_in`."""
        swapped = [_swapped(sequence) for sequence in group.sequences]
        ends = [each.num_tokens + count for each, count in zip(swapped, counts, strict=True)]
        return self._kv.swaps.num_blocks_to_swap_in(swapped, ends)

    def swap_in(self, group: SequenceGroup, counts: list[int], ticket: int) -> bool:
        """Give each sequence a slot, its blocks, and blocks for `counts` more tokens. Return
        whether the K/V are there only when `ticket` is done; if not, `arrive` may follow at
        once."""
        swapped = [_swapped(sequence) for sequence in group.sequences]
        starts = [each.num_tokens for each in swapped]
        slots = [self._table.enter(*each) for each in zip(group.sequences, starts, strict=True)]
        names = [sequence.names for sequence in group.sequences]
        is_copying = self._kv.swaps.swap_in(slots, swapped, names, ticket)
        begin = np.array(starts, np.int64)
        if not self._kv.grow(np.array(slots, np.int64), begin, begin + np.array(counts, np.int64)):
            raise EngineError("a swapped group was given fewer blocks than were counted for it")
        self.swapped_in_total += 1
        if is_copying:
            self._table.suspend(slots)
            self._kv.forget_updates(slots)  # their rows enter later, with whole tables
        return is_copying

    def arrive(
        self, group: SequenceGroup, lost: frozenset[int] = frozenset()
    ) -> list[int | None] | None:
        """The K/V of a group that was swapped in are there, but for what the blocks `lost` should
        hold: count as computed what precedes them. Return the checkpoints that its rows enter with;
        None if it has to be computed from the start, or by its samples in turn."""
        kept: list[int] = []
        checkpoints: list[int | None] = []
        for sequence in group.sequences:
            swapped, slot = _swapped(sequence), sequence.slot
            count = swapped.num_tokens
            if lost:
                count = self._kv.num_intact(slot, count, lost)
            kept.append(count)
            checkpoints.append(swapped.checkpoint)
            self._kv.swaps.discard(swapped)
            sequence.swapped = None
            self._table.resume(slot, count)
            self._arrived.add(slot)
        is_usable = len(kept) == 1 and kept[0] > 0 and self._kv.states is None
        return checkpoints if not lost or is_usable else None

    def note_planned(self, slots: Slots) -> None:
        """These slots compute in the step that is being planned."""
        if self._arrived:
            planned: list[int] = slots.tolist()
            self._swapped_in = self._arrived.intersection(planned)
            self._arrived -= self._swapped_in

    def slots_swapped_in(self) -> frozenset[int]:
        """Slots that compute for the first time since they were swapped in, in the step planned
        last. Once."""
        slots = frozenset(self._swapped_in)
        self._swapped_in.clear()
        return slots

    def forget(self, group: SequenceGroup) -> None:
        """Discard the group's K/V in the host, which cannot be trusted: the group will be computed
        again."""
        for sequence in group.sequences:
            if sequence.swapped is not None:
                self._kv.swaps.discard(sequence.swapped)
                sequence.swapped = None


def _swapped(sequence: Sequence) -> SavedTables:
    assert sequence.swapped is not None
    return sequence.swapped
