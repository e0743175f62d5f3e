"""Checkpoints of recurrent states on a disk, in parts as long as a block."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from quire.plan.kv_cache.disk_index import DiskIndex
from quire.plan.kv_cache.notices import BlockName
from quire.plan.kv_cache.sources import ELSEWHERE, Sources
from quire.plan.kv_cache.state_pool import StatePool
from quire.protocol.block_moves import MoveKind, SavedBlock, checkpoint_place

__all__ = ["DiskStates"]

CHECKPOINTS_PER_SAVE = 8
"""One in so many checkpoints may be held for saves that have not ended."""


class DiskStates:
    """Saves checkpoints beside the blocks of their prefixes, and loads them.

    A state is a chain of parts: part i has the state's name plus i, in a group behind the layer
    groups, and follows part i - 1. So a disk that drops one part drops the state.
    """

    def __init__(
        self, states: StatePool, disk: DiskIndex, sources: Sources, group: int, num_parts: int
    ) -> None:
        """group: number of the group of parts. num_parts: number of blocks as long as a state."""
        self._states = states
        self._disk = disk
        self._sources = sources
        self._group = group
        self.num_parts = num_parts
        self._waiting = deque[bytes](maxlen=max(states.num_checkpoints, 1))
        self._saves: dict[int, int] = {}  # checkpoints, by ticket
        self._loads: dict[int, tuple[bytes, int]] = {}  # names and checkpoints, by ticket
        self._void: set[int] = set()  # tickets of loads before everything was dropped

    # --- finding -------------------------------------------------------------------------------

    def find(self, name: bytes) -> int | None:
        """Return the checkpoint after the block with this name, or `ELSEWHERE` if the disk has the
        state; None if nobody has it."""
        found = self._states.find(name)
        return ELSEWHERE if found is None and self._is_stored(name) else found

    def _is_stored(self, name: bytes) -> bool:
        if not self._disk.num_held(self._group, [name]):
            return False
        return self._disk.num_held(self._group, self.names_of(name)) == self.num_parts

    def _names(self, name: bytes) -> list[BlockName]:
        first, size = int.from_bytes(name, "little"), 1 << (8 * len(name))
        numbers = ((first + i) % size for i in range(self.num_parts))
        return [(self._group, number.to_bytes(len(name), "little")) for number in numbers]

    def names_of(self, name: bytes) -> list[bytes]:
        """Return the names of the parts of the state after the block with this name."""
        return [part for _, part in self._names(name)]

    def touch(self, name: bytes) -> None:
        """Note a use of the state after the block with this name."""
        self._disk.touch(self._names(name))

    # --- loads ---------------------------------------------------------------------------------

    def ticket_of(self, name: bytes) -> int | None:
        """Return the ticket of the load that brings a state, if one is under way."""
        found = (ticket for ticket, (each, _) in self._loads.items() if each == name)
        return next((ticket for ticket in found if ticket not in self._void), None)

    def has_room(self, count: int) -> bool:
        """Return whether so many states can be loaded at once."""
        return self._states.num_replaceable >= count

    def load(self, name: bytes, ticket: int) -> None:
        """Start to load a state that the disk has into a checkpoint, for which there is room."""
        checkpoint = self._states.reserve()
        assert checkpoint is not None, "there is room"
        self._loads[ticket] = (name, checkpoint)
        blocks = self._names(name)
        slots = self._disk.load(blocks, ticket)
        pairs = zip(slots, blocks, strict=True)
        parts = [
            self._disk.saved(slot, block)._replace(depth=i) for i, (slot, block) in enumerate(pairs)
        ]
        self._move(MoveKind.LOAD, ticket, checkpoint, slots, parts)

    def _move(
        self,
        kind: MoveKind,
        ticket: int,
        checkpoint: int,
        slots: Sequence[int],
        parts: Sequence[SavedBlock],
    ) -> None:
        places = [checkpoint_place(checkpoint)] * len(slots)
        self._sources.move(ticket, kind, places, slots, tuple(parts))

    # --- saves ---------------------------------------------------------------------------------

    def settled(self, name: bytes) -> None:
        """Save the state after the block with this name, which nothing can retract any more."""
        if self._disk.takes_more and not self._is_stored(name):
            self._waiting.append(name)
            self._save()

    def _save(self) -> None:
        """Start saves of what waits and is still there, within the share of the checkpoints that
        they may hold."""
        most = max(1, self._states.num_checkpoints // CHECKPOINTS_PER_SAVE)
        while self._waiting and len(self._saves) < most:
            name = self._waiting.popleft()
            checkpoint = self._states.find(name)
            if checkpoint is None:
                continue
            before = b""
            parts = list[SavedBlock]()
            for i, (group, part) in enumerate(self._names(name)):
                parts.append(SavedBlock(group, part, before, i))
                before = part
            ticket = next(self._sources.ticket_numbers)
            taken = self._disk.save(parts, ticket)
            if taken:
                self._states.hold(checkpoint)
                self._saves[ticket] = checkpoint
                slots, saved = zip(*taken.values(), strict=True)
                self._move(MoveKind.SAVE, ticket, checkpoint, slots, saved)

    # --- ends ----------------------------------------------------------------------------------

    def end(self, ticket: int, lost: Collection[int]) -> None:
        """Take in that a move has ended; other tickets are ignored. lost: destinations that were
        not filled."""
        if ticket in self._saves:
            self._states.let_go(self._saves.pop(ticket))
            self._sources.end_save(ticket, lost)
            self._save()
        elif ticket in self._loads:
            self._end_load(ticket, is_whole=not lost)

    def _end_load(self, ticket: int, *, is_whole: bool) -> None:
        name, checkpoint = self._loads.pop(ticket)
        was_cancelled = self._sources.ends_cancelled(ticket)
        self._disk.end(ticket, ())
        is_void = ticket in self._void
        self._void.discard(ticket)
        if is_whole and not is_void:
            self._states.give_name(checkpoint, name)
            self._sources.totals.loaded += self.num_parts
            return
        self._states.release(checkpoint)
        if not is_whole and not was_cancelled:
            self._sources.totals.lost += 1
            self._disk.forget((self._group, name))

    def clear(self) -> None:
        """Save nothing of what waits, and offer nothing of loads that have not ended."""
        self._waiting.clear()
        self._void.update(self._loads)
