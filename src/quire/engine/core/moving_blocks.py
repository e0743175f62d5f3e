"""Blocks on their way to the disk and back, behind the steps that have been given."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from quire.compute.executor import Executor
from quire.plan.scheduler import Scheduler
from quire.protocol.block_moves import BlockMove, MoveKind, MoveOutcome

__all__ = ["MovingBlocks"]

SECONDS_TO_SAVE = 5.0
"""Given at the end to what is on its way to the disk."""


class MovingBlocks:
    """The moves that an executor carries out for a scheduler."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, on_taken: Callable[[], None]
    ) -> None:
        """on_taken: called when moves may have ended."""
        self._scheduler = scheduler
        self._executor = executor
        self._on_taken = on_taken
        self._moving: list[tuple[BlockMove, Future[MoveOutcome]]] = []

    @property
    def futures(self) -> list[Future[MoveOutcome]]:
        """Return the outcomes of the moves that have not been taken."""
        return [future for _, future in self._moving]

    @property
    def are_loading(self) -> bool:
        """True if blocks come back that requests wait for."""
        return any(move.kind is MoveKind.LOAD and len(move.blocks) for move, _ in self._moving)

    def start(self) -> None:
        """Start moves behind the steps that have been given."""
        for move in self._scheduler.take_moves():
            self._moving.append((move, self._executor.move_blocks(move)))
        for ticket in self._scheduler.take_cancelled():
            self._executor.cancel_move(ticket)

    def take(self) -> None:
        """Take in the moves that have ended, and start those that follow."""
        moving, self._moving = self._moving, []
        for move, future in moving:
            if not future.done():
                self._moving.append((move, future))
                continue
            outcome = future.result() if future.exception() is None else move.all_lost
            self._scheduler.moved(move.ticket, outcome)
        self.start()
        if moving:
            self._on_taken()

    def finish(self) -> None:
        """Let what has been computed reach the disk, within `SECONDS_TO_SAVE`."""
        self._scheduler.note_uses()
        self.start()
        end = time.monotonic() + SECONDS_TO_SAVE
        while (left := end - time.monotonic()) > 0.0:
            writing = [
                future
                for move, future in self._moving
                if move.kind is MoveKind.CLEAR or (move.kind is not MoveKind.LOAD and move.names)
            ]
            if not writing:
                return
            wait(writing, left, FIRST_COMPLETED)
            self.take()
