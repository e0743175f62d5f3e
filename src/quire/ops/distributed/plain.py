"""Collectives over shared memory in plain Python: the reference of csrc/exchange, and what serves
where there are no compiled kernels."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator

import torch

from quire.base.errors import EngineError, EngineLostError
from quire.base.platform.shared_region import SharedRegion
from quire.ops.distributed.collectives import Reduction, TorchCollectives, as_tree

__all__ = ["PEER_FAILED", "PlainCollectives", "drifted", "lost"]

POLL_S = 0.00005
PEER_FAILED = "another rank failed in this step"
_WRAP = 2**32
_EXCHANGES, _AGREEMENTS = 0, 1


def lost() -> EngineLostError:
    """The error of whoever finds the group over."""
    return EngineLostError(
        "another process of this engine has ended or hangs: start a new engine; a server does it "
        "by itself"
    )


def drifted() -> EngineLostError:
    """The error of a rank that has decided something else than another one."""
    return EngineLostError(
        "the processes of this engine have drawn different tokens: start a new engine, and report "
        "it please"
    )


class PlainCollectives(TorchCollectives):
    """`Collectives` of one rank of a region. They wait by looking again and again."""

    def __init__(self, region: SharedRegion, rank: int) -> None:
        self.size = region.size
        self._region = region
        self._rank = rank
        self._counts = [region.counts(each) for each in range(region.size)]
        self._votes = [region.votes(each) for each in range(region.size)]
        self._mark = 0

    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum") -> torch.Tensor:
        add = torch.add if op == "sum" else torch.maximum
        flat = x.contiguous().view(-1)
        out = torch.empty_like(flat)
        for piece, given in self._exchange(flat):
            out[piece] = as_tree(add, given)
        return out.view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.contiguous().view(-1)
        out = torch.empty((self.size, x.numel()), dtype=x.dtype)
        for piece, given in self._exchange(flat):
            for rank, each in enumerate(given):
                out[rank, piece] = each
        return torch.cat(list(out.view(self.size, *x.shape)), dim=-1)

    def agree(self, *, is_fine: bool) -> bool:
        own, votes = self._counts[self._rank], self._votes[self._rank]
        turn = int(own[_AGREEMENTS]) + 1
        votes[turn % 2] = is_fine
        votes[2] = own[_EXCHANGES]
        votes[3 + turn % 2] = self._mark
        if not is_fine:
            self._region.failed = True
        self._announce(_AGREEMENTS, turn)
        if any(each[3 + turn % 2] != self._mark for each in self._votes):
            raise drifted()
        if all(each[turn % 2] for each in self._votes):
            return True
        latest = max((int(each[2]) for each in self._votes), key=lambda n: _ahead(n, int(votes[2])))
        self._announce(_AGREEMENTS, turn + 1)  # all have read the votes
        own[_EXCHANGES] = latest
        if self._rank == 0:
            self._region.failed = False
        self._announce(_AGREEMENTS, turn + 2)
        return False

    def note(self, decided: bytes) -> None:
        self._mark = zlib.crc32(decided, self._mark)

    def _exchange(self, flat: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Yield parts of a tensor that fit into a place: the slice, and the part of each rank."""
        most = self._region.slot_bytes // flat.itemsize
        for start in range(0, len(flat), most):
            part = flat[start : start + most]
            number = int(self._counts[self._rank][_EXCHANGES]) + 1
            self._place(self._rank, number, part).copy_(part)
            self._announce(_EXCHANGES, number)
            given = [self._place(rank, number, part) for rank in range(self.size)]
            yield slice(start, start + len(part)), given

    def _place(self, rank: int, number: int, like: torch.Tensor) -> torch.Tensor:
        slot = torch.from_numpy(self._region.slot(rank, number))
        return slot[: like.numel() * like.itemsize].view(like.dtype)

    def _announce(self, what: int, number: int) -> None:
        """Announce this rank's exchange or agreement, and wait for that of all others."""
        self._counts[self._rank][what] = number % _WRAP
        for counts in self._counts:
            while _ahead(int(counts[what]), number) < 0:
                if self._region.is_aborted:
                    raise lost()
                if what == _EXCHANGES and self._region.failed:
                    raise EngineError(PEER_FAILED)
                time.sleep(POLL_S)


def _ahead(number: int, of: int) -> int:
    """Return how far one count is ahead of another, although they begin again at zero."""
    return (number - of + _WRAP // 2) % _WRAP - _WRAP // 2
