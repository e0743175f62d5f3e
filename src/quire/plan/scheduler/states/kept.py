"""Keeps recurrent states of running sequences, and ends their steps where that is worth it."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from quire.plan.kv_cache import KVManager, PrefixHit
from quire.plan.scheduler.sequence import Sequence
from quire.plan.scheduler.states.places import GAP, places_of, spaced
from quire.plan.scheduler.table import SequenceTable
from quire.protocol.step import IntArray

__all__ = ["KeptStates"]

Slots = npt.NDArray[np.int64]


class KeptStates:
    """Cuts prompts where their states are worth keeping, and keeps the states.

    A step can save only the state that it ends with, and a prefix can end only where every layer
    group has a whole block: on a grid. So a chunk ends at each place of its prompt.
    """

    def __init__(self, table: SequenceTable, kv: KVManager) -> None:
        self._table = table
        self._kv = kv
        self._grid = kv.layout.hit_tokens
        self._gap = min(GAP, 4 * self._grid)

    def spaced_ends(self, message_ends: IntArray) -> tuple[int, ...]:
        """Places at the ends of a prompt's messages; see `spaced`."""
        return spaced(message_ends, self._grid, self._gap)

    def choose_places(self, sequence: Sequence, hit: PrefixHit) -> None:
        """Choose where the chunks of a sequence end that enters with a prefix hit. Where its blocks
        have names beyond the hit, other prompts have branched off, which is a place too."""
        sequence.places = self._places(sequence, hit.num_tokens, hit.num_named)

    def _places(self, sequence: Sequence, start: int, branch: int) -> list[int]:
        ends, num_tokens = sequence.group.message_ends, len(sequence.token_ids)
        places = places_of(ends, num_tokens, self._grid, self._gap, start, branch)
        last = num_tokens // self._grid * self._grid
        if sequence.group.request.pin_seconds is not None and start < last:
            places = sorted({*places, last})  # from where all that start with it go on
        return [*places, num_tokens]

    def first_stop(self, sequence: Sequence, end: int) -> int:
        """Return where the first step ends of a waiting sequence without a prefix hit, if it could
        go to `end`."""
        return self._stop(self._places(sequence, 0, 0), 0, end)

    def is_coming(self, sequence: Sequence, num_cached: int, slots: Slots) -> bool:
        """Return whether one of `slots` [R], which compute in this step, goes on to keep a state
        from which a waiting sequence can start: worth a step more than its `num_cached` tokens."""
        table, names, size = self._table, sequence.names, self._kv.block_size
        most = min(len(sequence.token_ids) - 1, len(names) * size)
        for slot in slots[table.num_computed[slots] < table.num_prompt[slots]].tolist():
            other, first = table.at(slot), max(int(table.num_computed[slot]), num_cached)
            for place in other.places:
                index = place // size - 1
                if (
                    first < place <= min(most, len(other.names) * size)
                    and place - num_cached >= self._gap
                    and place % self._grid == 0
                    and other.names[index] == names[index]
                ):
                    return True
        return False

    def stops_at(self, slots: Slots, ends: Slots) -> Slots:
        """Return where steps of `slots` [R] that could go to `ends` [R] end."""
        starts, found = self._table.num_computed[slots], ends.copy()
        for i in (ends - starts > 1).nonzero()[0].tolist():
            sequence = self._table.at(int(slots[i]))
            found[i] = self.stop_of(sequence, int(starts[i]), int(ends[i]))
        return found

    def stop_of(self, sequence: Sequence, start: int, end: int) -> int:
        """Return where a step of a sequence that could go from `start` to `end` ends: at its next
        place, or else on the grid, if a step comes so far."""
        return self._stop(sequence.places, start, end)

    def _stop(self, places: list[int], start: int, end: int) -> int:
        index = bisect_right(places, start)
        if index < len(places) and places[index] <= end:
            return places[index]
        whole = end - end % self._grid
        return whole if whole > start else end

    def save(self, slots: Slots, drafted: Slots, counts: Slots) -> None:
        """Keep the states of these slots after the step that is being planned, where a prefix can
        end; of `drafted` slots, which verify `counts` drafts, the first ones that they may reach.
        For those who are looked up later: a step loads states before it saves others. A state
        within an output gets its name when its tokens are known. While drafts are in flight, nobody
        knows where a step ends, so none is kept."""
        table, size = self._table, self._kv.block_size
        computed, is_known = table.num_computed[slots], table.num_drafted[slots] == 0
        places = computed
        if len(drafted):
            most = np.zeros(len(table.live), np.int64)
            most[drafted] = counts
            places = -(-computed // self._grid) * self._grid
            is_known &= places <= computed + most[slots]
        for i in (is_known & (places % self._grid == 0)).nonzero()[0].tolist():
            slot, num_tokens = int(slots[i]), int(places[i])
            sequence = table.at(slot)
            if num_tokens > table.num_known[slot]:
                num_drafts = num_tokens - int(computed[i])
                self._kv.save_unnamed_state(slot, num_tokens // size, num_drafts)
                continue
            in_prompt = num_tokens <= table.num_prompt[slot]
            self._kv.save_state(
                slot,
                sequence.names[num_tokens // size - 1],
                in_passing=not (in_prompt and num_tokens in sequence.places),
            )

    def reached(self, slots: Slots, ends: Slots) -> None:
        """Let go of what a step with drafts was to keep beyond `ends` [R], the tokens that `slots`
        [R] had computed after it."""
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            self._kv.drop_unnamed_states(slot, end // self._kv.block_size)

    def give_names(self) -> None:
        """Name the states that were kept before their tokens were known, where they are now."""
        table = self._table
        for slot in self._kv.slots_with_unnamed_states:
            num_certain = int(min(table.num_known[slot], table.num_computed[slot]))
            names = table.at(slot).names
            self._kv.name_states(slot, names[: num_certain // self._kv.block_size])
