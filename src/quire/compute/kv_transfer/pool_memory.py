"""Memory of a device's KV blocks and checkpoints of states, as bytes to copy out and in."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from quire.config.kv_layout import STATE_PART_BYTES

__all__ = ["Bytes", "PoolMemory"]

Bytes = npt.NDArray[np.uint8]


class PoolMemory:
    """Copies whole blocks, and parts of checkpoints as long as a block, out of a pool on the host
    and into it. A checkpoint is named as by `checkpoint_place`."""

    def __init__(self, pages: torch.Tensor, checkpoints: torch.Tensor | None = None) -> None:
        """pages: pages of the KV pool, uint8 [N, B, ...]; N is 0 without K/V. checkpoints:
        recurrent states, uint8 [C, state_bytes]; None if the model has none. Without K/V, a part
        is as long as in `KVLayout.stored_sizes`."""
        self._pages: Bytes = pages.view(*pages.shape[:2], math.prod(pages.shape[2:])).numpy()
        self._checkpoints: Bytes | None = None if checkpoints is None else checkpoints.numpy()
        self.block_bytes = self._pages.shape[0] * self._pages.shape[2]
        if not self.block_bytes and checkpoints is not None:
            self.block_bytes = min(checkpoints.shape[1], STATE_PART_BYTES)

    @property
    def num_state_parts(self) -> int:
        """Number of blocks as long as a recurrent state."""
        if self._checkpoints is None:
            return 0
        return -(-self._checkpoints.shape[1] // self.block_bytes)

    def copy_out(self, place: int, part: int, target: Bytes) -> int:
        """Copy a block, or part number `part` of a checkpoint, to the first bytes of `target`.
        Return how many there are."""
        if place >= 0:
            num_segments, _, segment_bytes = self._pages.shape
            whole = target[: self.block_bytes].reshape(num_segments, segment_bytes)
            np.copyto(whole, self._pages[:, place])
            return self.block_bytes
        own = self._part(place, part)
        target[: len(own)] = own
        return len(own)

    def copy_in(self, place: int, part: int, source: Bytes) -> None:
        """Copy the first bytes of `source` to a block or a part of a checkpoint."""
        if place >= 0:
            num_segments, _, segment_bytes = self._pages.shape
            whole = source[: self.block_bytes].reshape(num_segments, segment_bytes)
            np.copyto(self._pages[:, place], whole)
            return
        own = self._part(place, part)
        np.copyto(own, source[: len(own)])

    def num_bytes(self, place: int, part: int) -> int:
        """Return the bytes of a block or a part of a checkpoint."""
        return self.block_bytes if place >= 0 else len(self._part(place, part))

    def _part(self, place: int, part: int) -> Bytes:
        assert self._checkpoints is not None, "the model has states"
        start = part * self.block_bytes
        return self._checkpoints[-1 - place, start : start + self.block_bytes]
