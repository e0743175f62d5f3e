"""Moves of several ranks end once, with what any of them has lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from quire.base.errors import EngineLostError
from quire.compute.executor.processes.messages import RankMoved
from quire.compute.executor.processes.rank_moves import RankMoves
from quire.protocol.block_moves import MoveOutcome
from quire.protocol.codec import encode, framed
from tests.waiting import WAIT_S


class Ranks:
    """The pipes of ranks 1 and 2, and the joint outcomes."""

    def __init__(self) -> None:
        self.pipes = [os.pipe(), os.pipe()]
        self.moves = RankMoves(lambda: [read for read, _ in self.pipes])

    def tell(self, rank: int, ticket: int, *lost: int, seconds: float = 0.0) -> None:
        moved = RankMoved(ticket, ints(*lost), seconds)
        os.write(self.pipes[rank - 1][1], framed(encode(moved)))

    def first_ends(self, ticket: int, *lost: int) -> None:
        done = Future[MoveOutcome]()
        done.set_result(MoveOutcome(ints(*lost)))
        self.moves.first_ended(ticket, done)

    def end(self, rank: int) -> None:
        os.close(self.pipes[rank - 1][1])


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.end(2)
    made.moves.close()
    for read, _ in made.pipes:
        os.close(read)


def test_what_one_rank_has_lost_is_lost(ranks: Ranks) -> None:
    first, second = ranks.moves.expect(1), ranks.moves.expect(2)
    ranks.tell(1, 2, 7, seconds=0.5)
    ranks.tell(1, 1)
    ranks.tell(2, 1, 5, 3)
    ranks.tell(2, 2, 8, seconds=2.0)
    ranks.first_ends(2, 7)
    outcome = second.result(WAIT_S)
    assert (outcome.lost.tolist(), outcome.seconds) == ([7, 8], 2.0)
    assert not first.done(), "the first rank has not ended it"
    ranks.first_ends(1)
    assert first.result(WAIT_S).lost.tolist() == [3, 5]
    ranks.end(1)


def test_no_move_waits_for_a_rank_that_has_ended(ranks: Ranks) -> None:
    under_way = ranks.moves.expect(1)
    ranks.end(1)
    with pytest.raises(EngineLostError):
        under_way.result(WAIT_S)
    ranks.first_ends(1)  # too late, and no harm
    with pytest.raises(EngineLostError):
        ranks.moves.expect(2).result(WAIT_S)


def test_a_fault_of_the_first_rank_ends_a_move(ranks: Ranks) -> None:
    joint, done = ranks.moves.expect(1), Future[MoveOutcome]()
    done.set_exception(OSError("no"))
    ranks.moves.first_ended(1, done)
    with pytest.raises(OSError, match="no"):
        joint.result(WAIT_S)
    ranks.tell(1, 1)
    ranks.end(1)
