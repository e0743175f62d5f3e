"""Ranks of one model as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Literal, TypeVar

import torch

from quire.config.shard import Shard
from quire.ops.distributed import Collectives, TorchCollectives, as_tree

T = TypeVar("T")

TIMEOUT_S = 120.0
"""For ranks that wait for one that never comes."""


class ThreadCollectives(TorchCollectives):
    """`Collectives` of threads that meet at a barrier."""

    def __init__(self, rank: int, barrier: Barrier, given: list[torch.Tensor | None]) -> None:
        """given: one place for each rank, shared by all."""
        self.size = barrier.parties
        self._rank, self._barrier, self._given = rank, barrier, given

    def all_reduce(self, x: torch.Tensor, op: Literal["sum", "max"] = "sum") -> torch.Tensor:
        parts = self._exchange(x)
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "ranks are out of step"
        add = torch.add if op == "sum" else torch.maximum
        return as_tree(add, parts)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def agree(self, *, is_fine: bool) -> bool:
        return all(each.item() for each in self._exchange(torch.tensor(is_fine)))

    def note(self, decided: bytes) -> None:
        """No engine runs on these."""

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[self._rank] = x.clone()
        self._barrier.wait(TIMEOUT_S)
        parts = [each for each in self._given if each is not None]
        self._barrier.wait(TIMEOUT_S)  # nobody writes before all have read
        return parts


def on_ranks(size: int, work: Callable[[Shard, Collectives], T]) -> list[T]:
    """Return the result of `work` on each rank. Raises the error of the rank that failed first."""
    barrier = Barrier(size)
    given: list[torch.Tensor | None] = [None] * size

    def run(rank: int) -> T:
        try:
            return work(Shard(rank, size), ThreadCollectives(rank, barrier, given))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for each in running if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [each.result() for each in running]
