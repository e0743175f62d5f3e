"""Tensors of an engine that sleeps: weights that host memory keeps, and what is dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping

import torch

__all__ = ["DroppedTensors", "WeightStash", "reachable_tensors"]


class WeightStash:
    """Every tensor stays what it is, a view of its storage; the storages are emptied meanwhile."""

    def __init__(self, model: object) -> None:
        """Copy out all storages that `model` reaches, and give their memory back."""
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for t in reachable_tensors(model)
        }
        self._kept = [(storage, storage.cpu().clone()) for storage in storages.values()]
        for storage, _ in self._kept:
            storage.resize_(0)

    def restore(self) -> None:
        """Copy everything back. Raises torch.OutOfMemoryError if another program has taken the
        memory; then it may be called again."""
        while self._kept:
            storage, copy = self._kept[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self._kept.pop()


class DroppedTensors:
    """Tensors that a worker drops. The garbage collector alone frees those in cycles."""

    def __init__(self, *roots: object) -> None:
        """roots: objects that reach the tensors, and that their owner is about to drop."""
        self._tensors = [weakref.ref(tensor) for tensor in reachable_tensors(roots)]

    def collect(self, owner: object) -> None:
        """Free all but those that `owner` still reaches. The garbage collector runs only if a cycle
        holds one, since it visits every object of the process. It visits what start-up has frozen
        only if that does not free them."""
        if not self._linger(owner):
            return
        gc.collect()
        if self._linger(owner) and gc.get_freeze_count() > 0:  # the count visits them too
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    def _linger(self, owner: object) -> bool:
        held = set(map(id, reachable_tensors(owner)))
        alive: list[torch.Tensor | None] = [tensor() for tensor in self._tensors]
        return any(tensor is not None and id(tensor) not in held for tensor in alive)


def reachable_tensors(root: object) -> Iterator[torch.Tensor]:
    """All tensors that an object of ours reaches through attributes and containers."""
    seen: set[int] = set()
    to_visit = [root]
    while to_visit:
        each = to_visit.pop()
        if id(each) in seen or each is None or isinstance(each, str | bytes | int | float | type):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, Mapping):
            to_visit.extend(each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            to_visit.extend(each)
        elif type(each).__module__.startswith("quire."):
            slots = (name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ()))
            to_visit.extend(getattr(each, name, None) for name in slots)
            to_visit.extend(getattr(each, "__dict__", {}).values())
