"""Recurrent states of running sequences, and checkpoints of them that prefixes can start from.

A recurrent state is no page: it has one size whatever the length, and each step overwrites it. A
step may be computed again, in halves after a failure, so a row reads one state and writes another,
and swaps the two when the step commits; that is the row's own affair (`runner/rows.py`). Here is
only which states exist, and which checkpoint holds the state after which prefix.
"""

from __future__ import annotations

from quire.errors import EngineError

__all__ = ["StatePool"]


class StatePool:
    """Checkpoints `0 … num_checkpoints - 1`, each of the state after one named prefix. The name is
    that of the prefix's last block. The least recently used one is replaced first.

    A plan loads checkpoints before it computes and saves them after it, so one that a plan loads
    may be replaced in the same plan.
    """

    def __init__(self, num_checkpoints: int) -> None:
        self.num_checkpoints = num_checkpoints
        self._free = list(range(num_checkpoints - 1, -1, -1))
        self._index: dict[bytes, int] = {}  # insertion order is LRU order
        self._name: list[bytes | None] = [None] * num_checkpoints

    @property
    def num_used(self) -> int:
        return len(self._index)

    def find(self, name: bytes) -> int | None:
        """The checkpoint of the state after the block with this name."""
        return self._index.get(name)

    def touch(self, checkpoint: int) -> None:
        """Note that a sequence starts from a checkpoint."""
        name = self._name[checkpoint]
        if name is not None:
            self._index[name] = self._index.pop(name)

    def save(self, name: bytes) -> int | None:
        """A checkpoint for the state after a block; None if it is kept already, or none may be."""
        if name in self._index or not self.num_checkpoints:
            return None
        if not self._free:
            self.forget(next(iter(self._index)))
        checkpoint = self._free.pop()
        self._index[name] = checkpoint
        self._name[checkpoint] = name
        return checkpoint

    def forget(self, name: bytes) -> None:
        """Drop the state after this block: no sequence may start from it any more."""
        checkpoint = self._index.pop(name, None)
        if checkpoint is not None:
            self._name[checkpoint] = None
            self._free.append(checkpoint)

    def forget_all(self) -> None:
        """After a change of weights no state is true any more."""
        for name in list(self._index):
            self.forget(name)

    def check_invariants(self) -> None:
        """EngineError unless each checkpoint is free or named exactly once."""
        named = list(self._index.values())
        if sorted(named + self._free) != list(range(self.num_checkpoints)) or any(
            self._name[checkpoint] != name for name, checkpoint in self._index.items()
        ):
            raise EngineError(
                f"checkpoints of states are lost: {named} are named and {self._free} are free "
                f"of {self.num_checkpoints}"
            )
