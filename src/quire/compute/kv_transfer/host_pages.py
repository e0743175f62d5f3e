"""KV blocks in host memory, of preempted sequences and evicted ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import numpy as np
import torch

from quire.compute.kv_transfer.block_copies import BlockCopies
from quire.protocol.step import IntArray

__all__ = ["HostPages"]

logger = logging.getLogger("quire")


class HostPages:
    """Blocks of the device and of the host, and the copies between the two.

    A copy that fails loses the blocks that it was to write, and nothing else: lost ones are
    remembered until they are written again.
    """

    def __init__(self, copies: BlockCopies) -> None:
        self._copies = copies
        self._lost: set[int] = set()

    def copy_out(self, src: IntArray, dst: IntArray) -> Collection[int]:
        """Device blocks `src` to host blocks `dst`, int32 [N]. Return the host blocks that were not
        filled."""
        if not len(src):
            return ()
        blocks: list[int] = dst.tolist()
        if _succeeds(self._copies.out, src, dst):
            self._lost.difference_update(blocks)
            return ()
        self._lost.update(blocks)
        return blocks

    def copy_in(self, src: IntArray, dst: IntArray) -> Collection[int]:
        """Host blocks `src` to device blocks `dst`, int32 [N]. Return the device blocks that hold
        nothing of worth, because the copy failed, or an earlier one to the host."""
        if not len(src):
            return ()
        blocks: list[int] = dst.tolist()
        if not _succeeds(self._copies.back, src, dst):
            return blocks
        pairs = zip(src.tolist(), blocks, strict=True)
        return [block for host, block in pairs if host in self._lost]


def _succeeds(
    copy: Callable[[torch.Tensor, torch.Tensor], None], src: IntArray, dst: IntArray
) -> bool:
    try:
        copy(torch.from_numpy(src.astype(np.int64)), torch.from_numpy(dst.astype(np.int64)))
    except Exception:  # whatever it is, only the blocks of this copy are lost
        logger.exception("copying %d KV blocks to host memory or back failed", len(src))
        return False
    return True
