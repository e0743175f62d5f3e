"""KV blocks in host memory, where preempted sequences may wait."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from quire.protocol.step import IntArray
from quire.runner.swap.block_copies import BlockCopies

__all__ = ["HostPages"]

logger = logging.getLogger("quire")


class HostPages:
    """Blocks of the device and of the host, and the copies between the two.

    A copy that fails loses the blocks that it was to write, and nothing else: what is lost is
    remembered until it is written again.
    """

    def __init__(self, copies: BlockCopies) -> None:
        self._copies = copies
        self._lost: set[int] = set()
        self._not_arrived: set[int] = set()

    def copy_out(self, src: IntArray, dst: IntArray) -> None:
        """Device blocks `src` to host blocks `dst`, int32 [N]."""
        if not len(src):
            return
        if _succeeds(self._copies.out, src, dst):
            self._lost.difference_update(dst.tolist())
        else:
            self._lost.update(dst.tolist())

    def copy_in(self, src: IntArray, dst: IntArray) -> None:
        """Host blocks `src` to device blocks `dst`, int32 [N]."""
        if not len(src):
            return
        if not _succeeds(self._copies.back, src, dst):
            self._not_arrived.update(dst.tolist())
            return
        for host, block in zip(src.tolist(), dst.tolist(), strict=True):
            if host in self._lost:
                self._not_arrived.add(block)

    def take_not_arrived(self) -> frozenset[int]:
        """Device blocks, of all copies in since the last call, that hold nothing of worth because
        the copy failed, or an earlier one to the host."""
        blocks = frozenset(self._not_arrived)
        self._not_arrived.clear()
        return blocks


def _succeeds(
    copy: Callable[[torch.Tensor, torch.Tensor], None], src: IntArray, dst: IntArray
) -> bool:
    try:
        copy(torch.from_numpy(src.astype(np.int64)), torch.from_numpy(dst.astype(np.int64)))
    except Exception:  # whatever it is, only the blocks of this copy are lost
        logger.exception("copying %d KV blocks to host memory or back failed", len(src))
        return False
    return True
