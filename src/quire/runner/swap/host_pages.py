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

    def copy_out(self, src: IntArray, dst: IntArray) -> None:
        """Device blocks `src` to host blocks `dst`, int32 [N]."""
        if not len(src):
            return
        if _succeeds(self._copies.out, src, dst):
            self._lost.difference_update(dst.tolist())
        else:
            self._lost.update(dst.tolist())

    def copy_in(self, src: IntArray, dst: IntArray) -> frozenset[int]:
        """Host blocks `src` to device blocks `dst`, int32 [N]. Device blocks that now hold nothing
        of worth, because this copy failed or an earlier one."""
        if not len(src):
            return frozenset()
        if not _succeeds(self._copies.back, src, dst):
            return frozenset(dst.tolist())
        return frozenset(
            to for host, to in zip(src.tolist(), dst.tolist(), strict=True) if host in self._lost
        )


def _succeeds(
    copy: Callable[[torch.Tensor, torch.Tensor], None], src: IntArray, dst: IntArray
) -> bool:
    try:
        copy(torch.from_numpy(src.astype(np.int64)), torch.from_numpy(dst.astype(np.int64)))
    except Exception:  # whatever it is, only the blocks of this copy are lost
        logger.exception("copying %d KV blocks to host memory or back failed", len(src))
        return False
    return True
