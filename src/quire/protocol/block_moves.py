"""Moves of KV blocks to a disk and back, beside the steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.protocol.step import IntArray, no_ints

__all__ = ["BlockMove", "MoveKind", "MoveOutcome", "SavedBlock", "checkpoint_place"]


class MoveKind(enum.Enum):
    """NOTE: write values and hits of places into their records. CLEAR: forget all that was
    written."""

    SAVE = "save"
    LOAD = "load"
    NOTE = "note"
    CLEAR = "clear"


class SavedBlock(NamedTuple):
    """A block under its name, as a record keeps it. A tuple, since each new block has one or two.

    group: number of the layer group. parent: name of the block before it in its prompt; empty if it
    is the first, or its group's blocks stand for themselves. depth: index in its prompt; 0 without
    a parent. value, hits: see `SlotTree`.
    """

    group: int
    name: bytes
    parent: bytes = b""
    depth: int = 0
    value: float = 0.0
    hits: int = 0


def checkpoint_place(checkpoint: int) -> int:
    """Return the number that stands for a checkpoint of a state among device blocks."""
    return -1 - checkpoint


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copies of device blocks to places, or of places to device blocks, under one ticket. Parts of
    a checkpoint (`checkpoint_place`) are copied like blocks: the depth of a name is the part.

    blocks, places: int32 [N]. names: one for each block, which a load must find. Device blocks
    belong to the move until it has ended: nobody writes those that are saved, and nobody reads or
    writes those that are loaded.
    """

    ticket: int
    kind: MoveKind
    blocks: IntArray
    places: IntArray
    names: tuple[SavedBlock, ...] = ()

    @property
    def all_lost(self) -> MoveOutcome:
        """Outcome of a move that filled nothing."""
        return MoveOutcome(self.places if self.kind is MoveKind.SAVE else self.blocks)


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """lost: destinations that hold nothing of worth. seconds: time of the copies."""

    lost: IntArray = field(default_factory=no_ints)
    seconds: float = 0.0
