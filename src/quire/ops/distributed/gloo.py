"""Collectives of ranks on several hosts, over torch's gloo.

Captured steps call kernels alone, so steps of such ranks are computed call by call. A rank whose
step fails cannot tell peers that wait in an exchange: the group is over then, as after a loss.
Torch's module for it is imported where it is used, as few engines do.
"""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch

from quire.ops.distributed.collectives import Reduction, TorchCollectives, as_tree
from quire.ops.distributed.plain import drifted, lost

__all__ = ["GlooCollectives", "GlooMeeting", "GlooStore"]

EXCHANGE_S: Final = 60.0
"""Longest wait for a peer: the longest step that one rank computes and another does not yet."""
JOIN_S: Final = 180.0
"""Longest wait for a peer that reads what the model is, or loads another part of it."""
LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class GlooMeeting:
    """The place where ranks on several hosts meet. host, port: address of rank 0's store. address:
    address at which the others reach this rank's host. check: raises once a peer is lost; asked
    while peers are missing."""

    size: int
    host: str
    port: int
    address: str
    check: Callable[[], object] = lambda: None

    def join(self, rank: int) -> GlooCollectives:
        """Return the collectives of a rank when all have joined. EngineLostError if one does
        not."""
        return GlooCollectives(self, rank)


class GlooStore:
    """The store by which ranks find each other, in the process of rank 0. It listens on a port that
    the system chooses."""

    def __init__(self, host: str) -> None:
        """host: address of this host."""
        distributed: Any = importlib.import_module("torch.distributed")
        self._store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.port = self._store.port


class GlooCollectives(TorchCollectives):
    """`Collectives` of one rank. Ranks may join again, as when their weights are loaded again; each
    time they meet under other keys of the store."""

    def __init__(self, meeting: GlooMeeting, rank: int) -> None:
        distributed: Any = importlib.import_module("torch.distributed")
        timeout = timedelta(seconds=EXCHANGE_S)
        self.size = meeting.size
        self._mark = 0
        maker = distributed.ProcessGroupGloo
        options = maker._Options()  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        options._devices = [maker.create_device(hostname=meeting.address)]  # noqa: SLF001
        try:
            store = distributed.TCPStore(
                meeting.host, meeting.port, is_master=False, timeout=timeout, wait_for_workers=False
            )
            turn = store.add(f"joined {rank}", 1)
            store = distributed.PrefixStore(f"quire {turn}", store)
            store.set(f"ready {rank}", "")
            _await_peers(store, meeting)
            self._group = maker(store, rank, meeting.size, options)
        except RuntimeError as error:
            raise lost() from error

    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        return as_tree(torch.add if op == "sum" else torch.maximum, self._given(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._given(x), dim=-1)

    def agree(self, *, is_fine: bool) -> bool:
        """EngineLostError if this rank is not fine: the others wait in an exchange."""
        if not is_fine:
            raise lost()
        marks = self._given(torch.tensor([self._mark], dtype=torch.int64))
        if any(int(mark) != self._mark for mark in marks):
            raise drifted()
        return True

    def note(self, decided: bytes) -> None:
        self._mark = zlib.crc32(decided, self._mark)

    def _given(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x of each rank, in their order. They cross as bytes, so that any dtype may."""
        flat = x.contiguous().view(-1).view(torch.uint8)
        given = [torch.empty_like(flat) for _ in range(self.size)]
        try:
            self._group.allgather([given], [flat]).wait()
        except RuntimeError as error:
            raise lost() from error
        return [each.view(x.dtype).view(x.shape) for each in given]


def _await_peers(store: Any, meeting: GlooMeeting) -> None:
    """Wait until all ranks are there. EngineLostError if one does not come; what `check` raises."""
    deadline = time.monotonic() + JOIN_S
    for rank in range(meeting.size):
        while not store.check([f"ready {rank}"]):
            meeting.check()
            if time.monotonic() > deadline:
                raise lost()
            time.sleep(LOOK_S)
