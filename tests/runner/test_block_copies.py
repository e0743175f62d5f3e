"""Blocks that wait in host memory, by way of a buffer, on a device that is as late as it may be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quire.compute.kv_transfer import block_copies
from quire.compute.kv_transfer.block_copies import StagedCopies
from quire.compute.kv_transfer.copy_lane import NoLane

Work = tuple[int, Callable[[], None]]


class LateLane:
    """The lane does its work only when somebody waits for it: a copy that starts before its data
    are there, or a buffer that is filled again too early, shows in what is copied.

    The current stream does at once what it is given.
    """

    def __init__(self) -> None:
        self._given: list[Callable[[], None]] = []
        self._num_done = 0

    def mark(self) -> None:
        return None

    def beside(self, work: Callable[[], None], after: None) -> int:
        del after  # the current stream is always there already
        self._given.append(work)
        return len(self._given)

    def wait(self, mark: int) -> None:
        for work in self._given[self._num_done : mark]:
            work()
        self._num_done = max(self._num_done, mark)


def upload(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("token_bytes", [16, 12, 6, 5])
def test_blocks_go_out_and_come_back(
    late: bool, token_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of two blocks, into host memory of three blocks a chunk, any size of word."""
    page = 3 * 2 * 4 * token_bytes
    monkeypatch.setattr(block_copies, "STAGING_BYTES", 2 * page)
    monkeypatch.setattr(block_copies, "CHUNK_BYTES", 3 * page + 1)
    pages = torch.randint(0, 256, (6, 9, 4 * token_bytes), dtype=torch.uint8)
    before = pages.clone()
    copies = StagedCopies(pages, 8, upload, LateLane() if late else NoLane())
    copies.out(ids(1, 4, 0, 8, 2), ids(7, 0, 3, 2, 6))
    pages.fill_(0)  # the blocks serve others at once
    copies.out(ids(5), ids(1))
    copies.back(ids(3, 0, 6), ids(2, 8, 1))
    copies.back(ids(7, 2), ids(6, 0))
    for was, now in ((0, 2), (4, 8), (2, 1), (1, 6), (8, 0)):
        assert torch.equal(pages[:, now], before[:, was])
    assert not pages[:, [3, 4, 5, 7]].any()


def test_a_late_lane_finds_a_copy_that_nobody_waits_for() -> None:
    """Else the test above could not fail."""
    pages = torch.ones((2, 4, 32), dtype=torch.uint8)
    lane = LateLane()
    copies = StagedCopies(pages, 4, upload, lane)
    lane.wait = lambda mark: None  # type: ignore[method-assign]
    copies.out(ids(0), ids(0))
    pages[:, 1] = 0
    copies.back(ids(0), ids(1))
    assert not torch.equal(pages[:, 0], pages[:, 1])
