"""Tensors that a worker drops as it falls asleep."""

from __future__ import annotations

import gc
import weakref

import torch

from quire.compute.worker.weight_stash import reachable_tensors

__all__ = ["DroppedTensors"]


class DroppedTensors:
    """Some of them are in cycles, which the garbage collector alone frees."""

    def __init__(self, *roots: object) -> None:
        """roots: objects that reach the tensors, and that their owner is about to drop."""
        self._tensors = [weakref.ref(tensor) for tensor in reachable_tensors(roots)]

    def collect(self, owner: object) -> None:
        """Free all but those that `owner` still reaches. Start-up may have frozen all objects of
        the process for the collector. They are visited if nothing less frees a tensor, since there
        may be a million of them."""
        gc.collect()
        if gc.get_freeze_count() > 0 and self._linger(owner):
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    def _linger(self, owner: object) -> bool:
        held = set(map(id, reachable_tensors(owner)))
        alive: list[torch.Tensor | None] = [tensor() for tensor in self._tensors]
        return any(tensor is not None and id(tensor) not in held for tensor in alive)
