"""Checks of tokens on the plan side: what a check refuses, rows forget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.protocol.request import EngineRequest
from quire.protocol.step import IntArray, no_ints
from quire.scheduler.sequence import Sequence
from quire.scheduler.state import SchedulerState

__all__ = ["TailRewinds", "TokenCheck", "Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many of the tokens stay, and token ids that follow these in place of the others."""

    num_accepted: int
    instead: IntArray = field(default_factory=no_ints)


class TokenCheck(Protocol):
    """Judges drawn tokens before a client sees them, such as a grammar that no mask can express, or
    a filter that changes the end of an output. An exception fails the request that it was asked
    about. Beams are chosen on the plan side anyway, so it is not asked about them."""

    def watches(self, request: EngineRequest) -> bool:
        """Whether `judge` is asked about this request. Asked once, when it arrives."""
        ...

    def judge(self, sequence: Sequence, known: IntArray, drawn: IntArray) -> Verdict | None:
        """What becomes of `drawn`, int32 [N], which follow `known`, int32 [M]; None: all stay.

        If tokens go and none come in their place, the sequence draws again. Noise depends on the
        position alone, so it draws the same token unless something else has changed.
        """
        ...


@dataclass(slots=True)
class _Rewind:
    """A row that waits for the results of steps that computed with refused tokens.

    num_instead: of its known tokens, the last ones that the row does not have. num_refused: tokens
    that only the row has. last_step: whose result is the last one to wait for.
    """

    slot: int
    generation: int
    num_instead: int
    num_refused: int
    last_step: int


class TailRewinds:
    """How many tokens a row has is certain when no step with it is in flight. So a row with refused
    tokens computes nothing until then, and the next plan rewinds it."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._waiting: list[_Rewind] = []

    def begin(self, slot: int, num_instead: int, num_refused: int, last_step: int) -> None:
        """A stopped row has been given its tokens and goes on."""
        generation = int(self._state.table.generation[slot])
        self._waiting.append(_Rewind(slot, generation, num_instead, num_refused, last_step))

    def may_stay(self, slot: int, num_instead: int) -> bool:
        """Whether a stopped row can be rewound where it is. To draw again it computes its last
        token again, which must not be in a block that others may have found by name. A recurrent
        state cannot be taken back."""
        kv, num_known = self._state.kv, int(self._state.table.num_known[slot])
        return kv.states is None and (num_instead > 0 or num_known % kv.block_size > 0)

    def count(self, slots: Iterable[int], counts: Iterable[int]) -> None:
        """Rows of these slots were given tokens that were not asked for any more."""
        given = dict(zip(slots, counts, strict=True))
        for rewind in self._waiting:
            rewind.num_refused += given.get(rewind.slot, 0)

    def settle(self, step_id: int) -> None:
        """The result of this step was applied: let rows go on that waited for it."""
        due = [rewind for rewind in self._waiting if rewind.last_step <= step_id]
        if due:
            self._waiting = [rewind for rewind in self._waiting if rewind.last_step > step_id]
            for rewind in due:
                self._rewind(rewind)

    def _rewind(self, rewind: _Rewind) -> None:
        """Tell the row, unless the sequence has left it."""
        table, slot = self._state.table, rewind.slot
        if table.generation[slot] != rewind.generation:
            return
        num_known = int(table.num_known[slot])
        num_kept = num_known - rewind.num_instead
        num_in_row = num_kept + rewind.num_refused
        if not rewind.num_instead:
            num_kept -= 1  # the last one is given again, so that the row computes it
        num_computed = min(num_in_row - 1, num_kept)
        tokens: list[int] = table.token_ids[slot, num_kept:num_known].tolist()
        table.go_on(slot, num_computed)
        slots: npt.NDArray[np.int64] = np.array([slot])
        self._state.kv.give_back(slots, slots * 0 + num_computed)
        self._state.builder.replace_tail(slot, num_in_row - num_kept, tokens)

    def forget(self) -> None:
        """The steps in flight are lost, and rows with them."""
        self._waiting.clear()
