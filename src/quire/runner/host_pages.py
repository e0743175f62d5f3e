"""KV blocks in host memory, where preempted sequences may wait."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from quire.protocol.step import IntArray

__all__ = ["HostPages"]

logger = logging.getLogger("quire")

SwapBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class HostPages:
    """Pages like those of the device, [L, 2, num_blocks, ...], and the copies between the two.

    A copy that fails loses the blocks that it was to write, and nothing else: what is lost is
    remembered until it is written again.
    """

    def __init__(self, device: torch.Tensor, num_blocks: int, swap_blocks: SwapBlocks) -> None:
        """device: the KV pool's pages, uint8 [L, 2, B, S, token_bytes]."""
        self._device = device
        self._host = torch.empty(
            (*device.shape[:2], num_blocks, *device.shape[3:]),
            dtype=device.dtype,
            pin_memory=device.device.type == "cuda" and num_blocks > 0,
        )
        self._swap_blocks = swap_blocks
        self._lost: set[int] = set()

    def copy_out(self, src: IntArray, dst: IntArray) -> None:
        """Device blocks `src` to host blocks `dst`, int32 [N]."""
        if not len(src):
            return
        if self._copy(self._device, self._host, src, dst):
            self._lost.difference_update(dst.tolist())
        else:
            self._lost.update(dst.tolist())

    def copy_in(self, src: IntArray, dst: IntArray) -> frozenset[int]:
        """Host blocks `src` to device blocks `dst`, int32 [N]. Device blocks that now hold nothing
        of worth, because this copy failed or an earlier one."""
        if not len(src):
            return frozenset()
        if not self._copy(self._host, self._device, src, dst):
            return frozenset(dst.tolist())
        return frozenset(
            to for host, to in zip(src.tolist(), dst.tolist(), strict=True) if host in self._lost
        )

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, src: IntArray, dst: IntArray
    ) -> bool:
        try:
            self._swap_blocks(source, target, _ids(src), _ids(dst))
        except Exception:  # whatever it is, only the blocks of this copy are lost
            logger.exception("copying %d KV blocks to host memory or back failed", len(src))
            return False
        return True


def _ids(blocks: IntArray) -> torch.Tensor:
    return torch.from_numpy(blocks.astype(np.int64))
