"""Gives a waiting group slots, its cached or swapped blocks, and room to compute."""

from __future__ import annotations

import numpy as np

from quire.base.errors import EngineError
from quire.plan.kv_cache import PrefixHit
from quire.plan.scheduler.sequence import Sequence, SequenceGroup
from quire.plan.scheduler.state import SchedulerState

__all__ = ["Allocation"]

NUM_BLOCKS_PER_HEADROOM = 100
"""New groups leave one block in a hundred to those that already run, so that an admission does
not cause a preemption in the next step (the value is that of vLLM's watermark)."""

Chunk = tuple[int, int]
"""A slot, and the tokens that it computes in the step in which it is filled."""


class Allocation:
    """Gives a whole group slots and blocks, or nothing. prompt_tokens_total, cached_tokens_total:
    over all groups placed for the first time."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0

    def place(self, group: SequenceGroup, budget: int) -> list[Chunk]:
        """Let each sequence of a waiting group compute, at most `budget` tokens in all. If the
        group does not fit, nothing changes. A group whose K/V are first copied from the host is
        blocked on the copy; it has its slots and blocks already."""
        if budget <= 0 or group.num_slots > self._state.num_free_slots:
            return []
        hits: list[PrefixHit] = []
        if group.sequences[0].swapped is not None:
            chunks, checkpoints = self._swap_in(group, budget)
        else:
            chunks, hits = self._enter_all(group, budget)
            checkpoints = [hit.checkpoint for hit in hits]
        if chunks and not group.blocked_on:
            self._note(group, hits, checkpoints)
        return chunks

    def usable(self, group: SequenceGroup, budget: int) -> int:
        """Return the budget that a waiting group can use: 0 if media come next that it must compute
        whole, and they are longer."""
        first = group.sequences[0]
        if budget <= 0 or not group.whole_end:
            return budget
        start = (first.swapped or self._state.prefixes.lookup(first)).num_tokens
        end = min(len(first.token_ids), start + budget)
        return budget if group.stop_of(start, end) > start else 0

    def has_nothing_to_compute(self, group: SequenceGroup) -> bool:
        """Return whether all tokens of an open prompt but the last one are in the cache or on the
        host."""
        if not group.request.is_open:
            return False
        sequence = group.sequences[0]
        if sequence.swapped is not None:
            num_cached = sequence.swapped.num_tokens
        else:
            num_cached = self._state.prefixes.lookup(sequence).num_tokens
        return num_cached >= len(sequence.token_ids) - 1

    def _enter_all(self, group: SequenceGroup, budget: int) -> tuple[list[Chunk], list[PrefixHit]]:
        """Return the chunks as `place` does, and the cached prefix of each sequence."""
        chunks: list[Chunk] = []
        hits: list[PrefixHit] = []
        mark = self._state.kv.mark()
        for sequence in group.sequences:
            hit = self._state.prefixes.lookup(sequence)
            chunk = self._enter(sequence, hit, budget)
            if chunk is None:
                self._undo(group, mark)
                return [], []
            budget -= chunk[1]
            chunks.append(chunk)
            hits.append(hit)
        for sequence, hit in zip(group.sequences, hits, strict=True):
            self._state.pins.note_hit(hit, sequence)
        return chunks, hits

    def _enter(self, sequence: Sequence, hit: PrefixHit, budget: int) -> Chunk | None:
        """Give the sequence a slot that starts with its cached prefix, and blocks for as many
        tokens as the budget allows. None if there is no room."""
        num_ready = len(sequence.token_ids) - sequence.group.request.is_open
        end = min(num_ready, hit.num_tokens + budget)
        if (states := self._state.states) is not None:
            states.choose_places(sequence, hit)
            end = states.stop_of(sequence, hit.num_tokens, end)
        end = sequence.group.stop_of(hit.num_tokens, end)
        if not self.has_room(self._state.kv.prefixes.num_blocks_to_enter(hit, end)):
            return None
        slot = self._state.table.enter(sequence, hit.num_tokens)
        slots = np.array([slot], np.int64)
        self._state.kv.enter(slot, hit)
        if not self._state.kv.grow(slots, slots * 0 + hit.num_tokens, slots * 0 + end):
            raise EngineError("an admission was given fewer blocks than were counted for it")
        self._state.prefixes.publish_to(slot, end)
        return slot, end - hit.num_tokens

    def _swap_in(self, group: SequenceGroup, budget: int) -> tuple[list[Chunk], list[int | None]]:
        """Return the chunks as `place` does, for a group whose K/V wait in the host, and the
        checkpoints of its states if it enters at once."""
        state, recovery = self._state, self._state.recovery
        counts = recovery.plan_swap_in(group, budget)
        if (states := state.states) is not None:
            starts = [each.swapped.num_tokens for each in group.sequences if each.swapped]
            spans = zip(group.sequences, starts, counts, strict=True)
            counts = [states.stop_of(each, first, first + n) - first for each, first, n in spans]
        if not self.has_room(recovery.num_blocks_to_swap_in(group, counts)):
            return [], []
        ticket = state.tickets.start(group, "its K/V on the host")
        checkpoints: list[int | None] = []
        if not recovery.swap_in(group, counts, ticket):
            state.tickets.end(ticket)
            checkpoints = recovery.arrive(group) or []
            for sequence in group.sequences:
                num_computed = int(state.table.num_computed[sequence.slot])
                state.prefixes.publish_to(sequence.slot, num_computed)
        slots = [sequence.slot for sequence in group.sequences]
        return list(zip(slots, counts, strict=True)), checkpoints

    def has_room(self, num_blocks: int) -> bool:
        """Return whether a waiting group may have so many blocks."""
        pool = self._state.kv.pool
        headroom = pool.num_blocks // NUM_BLOCKS_PER_HEADROOM if self._state.roster.running else 0
        return num_blocks + headroom <= pool.num_available

    def _undo(self, group: SequenceGroup, mark: int) -> None:
        """Take back what sequences of the group have got since `mark`."""
        self._state.kv.retract(mark)
        entered = [sequence for sequence in group.sequences if sequence.slot >= 0]
        self._state.kv.forget_updates({sequence.slot for sequence in entered})
        for sequence in entered:
            self._state.kv.free(sequence.slot)
            self._state.table.leave(sequence)
        self._state.kv.forget_copies()

    def _note(
        self, group: SequenceGroup, hits: list[PrefixHit], checkpoints: list[int | None]
    ) -> None:
        """Announce the admission to the plan, and the first one to the client too. hits: none for a
        group that was swapped in. checkpoints: checkpoints of its rows' first states."""
        for sequence, checkpoint in zip(group.sequences, checkpoints, strict=True):
            num_computed = int(self._state.table.num_computed[sequence.slot])
            self._state.builder.enter(sequence, num_computed, checkpoint)
        group.was_fetched = False
        num_cached = sum(hit.num_tokens for hit in hits)
        clock = self._state.roster.clock
        num_kept = sum(int(self._state.table.num_computed[each.slot]) for each in group.sequences)
        group.record.come_back(num_kept, clock.now)
        if not group.was_admitted:
            group.was_admitted = True
            group.record.admit(clock, self._state.prefixes.facts(group.sequences[0], hits[0]))
            self.prompt_tokens_total += len(group.request.prompt_token_ids)
            self.cached_tokens_total += num_cached
            for sequence, hit in zip(group.sequences, hits, strict=False):
                self._state.prefixes.touch(sequence, hit)
            self._state.outputs.cached(group.sequences[0].handle, num_cached)
