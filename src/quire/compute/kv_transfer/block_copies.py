"""Copies KV blocks to host memory and back: directly on a CPU, through a buffer on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from quire.compute.kv_transfer.copy_lane import CopyLane, Mark

__all__ = ["BlockCopies", "DirectCopies", "StagedCopies"]

STAGING_BYTES = 64 * 2**20
"""Size of each of the two buffers on a GPU: copies of this size are as fast as any, and longer ones
go in pieces."""

CHUNK_BYTES = 256 * 2**20
"""torch gives pinned memory in powers of two: one of this size wastes less than a block."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BlockCopies(Protocol):
    """Both ways; src, dst: int64 [N] on the host, destinations distinct. A later copy sees what an
    earlier one wrote, and so do kernels that are launched after it."""

    def out(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy device blocks `src` to host blocks `dst`."""
        ...

    def back(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy host blocks `src` to device blocks `dst`."""
        ...


class DirectCopies:
    """Copies where device and host are one memory. pages: pages of the KV pool, uint8 [N, B, S,
    token_bytes]. swap_blocks: the operation."""

    def __init__(
        self, pages: torch.Tensor, num_blocks: int, swap_blocks: Callable[..., None]
    ) -> None:
        self._pages = pages
        self._host = torch.empty((pages.shape[0], num_blocks, *pages.shape[2:]), dtype=pages.dtype)
        self._swap_blocks = swap_blocks

    def out(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._swap_blocks(self._pages, self._host, src, dst)

    def back(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self._swap_blocks(self._host, self._pages, src, dst)


class StagedCopies:
    """Copies between a GPU and pinned memory, beside the kernels of a step.

    A block lies in as many places of the pool as there are planes. One kernel gathers blocks into a
    buffer, where each is whole. They go over the bus whole, one asynchronous copy each, while the
    next kernels run. On the way back one kernel scatters them. Host memory has blocks whole.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        num_blocks: int,
        upload: Callable[[np.ndarray], torch.Tensor],
        lane: CopyLane,
    ) -> None:
        """pages: see `DirectCopies`; on any device. upload: makes a tensor beside them from an
        array, without waiting for the device."""
        self._lane = lane
        self._upload = upload
        word = next(each for each in _WORDS if pages.shape[-1] % each.itemsize == 0)
        self._blocks = pages.view(word).transpose(0, 1)  # [B, N, words]
        block = self._blocks.shape[1:]
        page = self._blocks[:1].numel() * word.itemsize
        pinned = pages.device.type == "cuda"
        self._per_chunk = max(1, CHUNK_BYTES // page)
        self._host = [
            torch.empty((count, *block), dtype=word, pin_memory=pinned)
            for count in _cut(num_blocks, self._per_chunk)
        ]
        self._size = min(num_blocks, max(1, STAGING_BYTES // page))
        self._outgoing, self._incoming = (
            torch.empty((self._size, *block), dtype=word, device=pages.device) for _ in range(2)
        )
        self._sent: Mark | None = None  # the outgoing buffer may be written again
        self._scattered: Mark | None = None  # the incoming one may

    def out(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for piece in self._pieces(len(src)):
            ids, targets = self._upload(src[piece].numpy()), dst[piece].tolist()
            buffer = self._outgoing[: len(targets)]
            if self._sent is not None:
                self._lane.wait(self._sent)
            torch.index_select(self._blocks, 0, ids, out=buffer)
            self._sent = self._lane.beside(
                lambda targets=targets, buffer=buffer: _copy_each(
                    zip(buffer, map(self._host_block, targets), strict=True)
                ),
                after=self._lane.mark(),
            )

    def back(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        for piece in self._pieces(len(src)):
            ids, sources = self._upload(dst[piece].numpy()), src[piece].tolist()
            buffer = self._incoming[: len(sources)]
            arrived = self._lane.beside(
                lambda sources=sources, buffer=buffer: _copy_each(
                    zip(map(self._host_block, sources), buffer, strict=True)
                ),
                after=self._scattered,
            )
            self._lane.wait(arrived)
            self._blocks.index_copy_(0, ids, buffer)
            self._scattered = self._lane.mark()

    def _host_block(self, index: int) -> torch.Tensor:
        return self._host[index // self._per_chunk][index % self._per_chunk]

    def _pieces(self, count: int) -> Iterator[slice]:
        return (slice(start, start + self._size) for start in range(0, count, self._size))


def _cut(count: int, size: int) -> Iterator[int]:
    """`count` in pieces of `size`, and what is left."""
    return (min(size, count - start) for start in range(0, count, size))


def _copy_each(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Whole blocks; asynchronous where one side is pinned."""
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
