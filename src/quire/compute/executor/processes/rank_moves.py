"""Ends of moves to the disk and back, each of which all ranks make."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from quire.base.errors import EngineLostError
from quire.compute.executor.processes.messages import RankMoved
from quire.protocol.block_moves import MoveOutcome
from quire.protocol.codec import Codec, GarbledMessageError, read_exactly

__all__ = ["RankMoves"]


class _Move:
    """A move that has not ended everywhere. num_missing: number of ranks to hear of."""

    def __init__(self, num_ranks: int) -> None:
        self.future = Future[MoveOutcome]()
        self.num_missing = num_ranks
        self.outcome = MoveOutcome()

    def add(self, outcome: MoveOutcome) -> None:
        """Take in a rank's outcome. A block that one rank has lost is lost, and the slowest rank
        counts."""
        lost = np.union1d(self.outcome.lost, outcome.lost).astype(np.int32)
        self.outcome = MoveOutcome(lost, max(self.outcome.seconds, outcome.seconds))
        self.num_missing -= 1


class RankMoves:
    """Joins the outcomes of all ranks. A thread reads the pipes of the ranks after the first."""

    def __init__(self, pipes: Callable[[], Sequence[int]]) -> None:
        """pipes: returns the pipes on which ranks tell of `RankMoved`, once they have been
        started."""
        self._pipes = pipes
        self._moves: dict[int, _Move] = {}
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._is_lost = False

    def expect(self, ticket: int) -> Future[MoveOutcome]:
        """Return the future of a move that is given to all ranks next. It raises EngineLostError if
        a rank ends before."""
        pipes = self._pipes()
        with self._lock:
            self._moves[ticket] = move = _Move(1 + len(pipes))
            if self._reader is None:
                self._reader = threading.Thread(
                    target=self._read_all, args=(pipes,), name="quire-moves", daemon=True
                )
                self._reader.start()
            is_lost = self._is_lost
        if is_lost:
            self._lose()
        return move.future

    def first_ended(self, ticket: int, done: Future[MoveOutcome]) -> None:
        """Take in the end of a move of the first rank."""
        error = done.exception()
        if error is None:
            self._ended(ticket, done.result())
            return
        with self._lock:
            move = self._moves.pop(ticket, None)
        if move is not None:
            move.future.set_exception(error)

    def _ended(self, ticket: int, outcome: MoveOutcome) -> None:
        with self._lock:
            move = self._moves.get(ticket)
            if move is None:
                return
            move.add(outcome)
            if move.num_missing:
                return
            del self._moves[ticket]
        move.future.set_result(move.outcome)

    def _read_all(self, pipes: Sequence[int]) -> None:
        codec, poll = Codec[RankMoved](RankMoved), select.poll()
        for pipe in pipes:
            poll.register(pipe, select.POLLIN)
        with contextlib.suppress(EOFError, OSError, GarbledMessageError):
            while True:
                for pipe, _ in poll.poll():
                    moved = codec.decode(_read(pipe))
                    self._ended(moved.ticket, MoveOutcome(moved.lost, moved.seconds))
        self._lose()

    def _lose(self) -> None:
        """A rank has ended: no move of all ranks ends any more."""
        with self._lock:
            self._is_lost = True
            moves, self._moves = list(self._moves.values()), {}
        for move in moves:
            move.future.set_exception(EngineLostError("a rank ended: start a new engine"))

    def close(self) -> None:
        """Wait for the thread, after all ranks have ended."""
        if self._reader is not None:
            self._reader.join()


def _read(pipe: int) -> bytes:
    return read_exactly(pipe, int.from_bytes(read_exactly(pipe, 4), "big"))
