"""Recurrent states of rows, and checkpoints of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quire.attention import StateInputs
from quire.protocol.step import EnterRow, IntArray
from quire.runner.rows import RowTable

__all__ = ["RecurrentStates"]


class RecurrentStates:
    """States in the memory of the host, each with those of all layers in one piece. A row has two
    places, which `RowTable` names; behind these lie the checkpoints. Nobody clears a place: layers
    take zeros for rows without computed tokens."""

    def __init__(self, rows: RowTable, num_checkpoints: int, state_bytes: int) -> None:
        """state_bytes: bytes of the states of all layers of a sequence, on this rank."""
        self._rows = rows
        self._first = 2 * len(rows.num_tokens)
        self._places = torch.empty((self._first + num_checkpoints, state_bytes), dtype=torch.uint8)
        self._read = torch.from_numpy(rows.read_state)
        self._write = torch.from_numpy(rows.write_state)
        self._num_computed = torch.from_numpy(rows.num_computed)

    @property
    def checkpoints(self) -> torch.Tensor:
        """The memory of the checkpoints, uint8 [C, state_bytes]."""
        return self._places[self._first :]

    def inputs(self, slots: torch.Tensor) -> StateInputs:
        """Return what layers read of the rows in `slots` [R], in memory that stays."""
        return StateInputs(self._places, self._read, self._write, self._num_computed, slots)

    def enter(self, rows: Iterable[EnterRow]) -> None:
        """Let rows start from their checkpoints."""
        for row in rows:
            if row.checkpoint is not None:
                place = self._rows.read_state[row.slot]
                self._places[place] = self._places[self._first + row.checkpoint]

    def fork(self, src: int, dst: int) -> None:
        """Give row `dst` the state of row `src`."""
        read = self._rows.read_state
        self._places[read[dst]] = self._places[read[src]]

    def save(self, slots: IntArray, checkpoints: IntArray) -> None:
        """Keep the states that rows [N] have committed in checkpoints [N]."""
        if len(slots):
            places = torch.from_numpy(self._rows.read_state[slots])
            to = torch.from_numpy(checkpoints.astype("int64")) + self._first
            self._places[to] = self._places[places]
