"""Recurrent states of running sequences, and checkpoints of them that prefixes can start from.

A recurrent state is no page: it has one size whatever the length, and each step overwrites it. A
step may be computed again, in halves after a failure, so a row reads one state and writes another,
and swaps the two when the step commits; that is the row's own affair (`compute/runner/rows.py`).
Here is only which states exist, and which checkpoint holds the state after which prefix.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.base.errors import EngineError

__all__ = ["StatePool"]


class StatePool:
    """Checkpoints `0 … num_checkpoints - 1`, each of the state after one named prefix, or of one
    that gets its name when its last tokens are known. The name is that of the prefix's last block.

    The one that is worth least is replaced first. Worth counts the sequences that have started from
    a checkpoint, the first one excepted: the end of a turn is continued once, a system prompt
    often. It is counted from the worth of what was replaced last, so that what was popular once
    goes too (GreedyDual with frequencies, Cherkasova 1998). Of equal ones the least recently used
    goes.

    A plan loads checkpoints before it computes and saves them after it, so one that a plan loads
    may be replaced in the same plan. But what it stashes is kept before it loads any.
    """

    def __init__(self, num_checkpoints: int) -> None:
        self.num_checkpoints = num_checkpoints
        self._free = list(range(num_checkpoints - 1, -1, -1))
        self._unnamed = set[int]()
        self._index: dict[bytes, int] = {}  # insertion order is LRU order
        self._name: list[bytes | None] = [None] * num_checkpoints
        self._num_loads = [0] * num_checkpoints
        self._worth = [0] * num_checkpoints
        self._base = 0  # the worth of what was replaced last
        self._loading = set[int]()  # by the next plan
        self._held: dict[int, int] = {}  # number of moves and pins that need a checkpoint

    @property
    def num_used(self) -> int:
        return len(self._index)

    def find(self, name: bytes) -> int | None:
        """The checkpoint of the state after the block with this name."""
        return self._index.get(name)

    def touch(self, checkpoint: int) -> None:
        """Note that a sequence starts from a checkpoint with the next plan."""
        self._loading.add(checkpoint)
        name = self._name[checkpoint]
        if name is not None:
            self._index[name] = self._index.pop(name)
            self._num_loads[checkpoint] += 1
            self._worth[checkpoint] = self._base + self._num_loads[checkpoint]

    def save(self, name: bytes) -> int | None:
        """A checkpoint for the state after a block; None if it is kept already, or none may be."""
        if name in self._index:
            return None
        checkpoint = self.reserve()
        if checkpoint is not None:
            self.give_name(checkpoint, name)
        return checkpoint

    def reserve(self) -> int | None:
        """A checkpoint that nobody finds until `give_name`; None if all others are such too, or
        held."""
        return self._reserve(())

    def stash(self, count: int) -> list[int] | None:
        """Checkpoints without names for so many states that the next plan keeps first of all. None,
        and nothing changes but what is kept, if there are fewer that it does not load."""
        found: list[int] = []
        while len(found) < count:
            checkpoint = self._reserve(self._loading)
            if checkpoint is None:
                for each in found:
                    self.release(each)
                return None
            found.append(checkpoint)
        return found

    def unstash(self, checkpoint: int) -> None:
        """Take back what `stash` gave. The next plan may load it."""
        self._loading.add(checkpoint)
        self.release(checkpoint)

    def plan_made(self) -> None:
        """Take in that a plan has all loads so far."""
        self._loading.clear()

    def _reserve(self, besides: Collection[int]) -> int | None:
        """Return a checkpoint that is not one of `besides`, and let nobody find it."""
        free = (each for each in reversed(self._free) if each not in besides)
        checkpoint = next(free, None)
        if checkpoint is None:
            others = [
                each
                for each in self._index.values()
                if each not in self._held and each not in besides
            ]
            if not others:
                return None
            checkpoint = min(others, key=self._worth.__getitem__)
            self._base = self._worth[checkpoint]
            self._forget(checkpoint)
        self._free.remove(checkpoint)
        self._unnamed.add(checkpoint)
        return checkpoint

    def give_name(self, checkpoint: int, name: bytes) -> bool:
        """Let sequences find a reserved checkpoint after the block with this name. False, and the
        checkpoint is free, if there is one for it already."""
        self._unnamed.remove(checkpoint)
        if name in self._index:
            self._free.append(checkpoint)
            return False
        self._index[name] = checkpoint
        self._name[checkpoint] = name
        self._num_loads[checkpoint] = 0
        self._worth[checkpoint] = self._base + 1
        return True

    @property
    def num_replaceable(self) -> int:
        """Number of checkpoints that `reserve` can give."""
        named = sum(checkpoint not in self._held for checkpoint in self._index.values())
        return len(self._free) + named

    def hold(self, checkpoint: int) -> None:
        """Keep the memory of a checkpoint as it is until `let_go`, also if its name is dropped."""
        self._held[checkpoint] = self._held.get(checkpoint, 0) + 1

    def let_go(self, checkpoint: int) -> None:
        """End one `hold`."""
        self._held[checkpoint] -= 1
        if not self._held[checkpoint]:
            del self._held[checkpoint]
            if self._name[checkpoint] is None:
                self._free.append(checkpoint)

    def release(self, checkpoint: int) -> None:
        """Take back a reserved checkpoint that gets no name."""
        self._unnamed.remove(checkpoint)
        self._free.append(checkpoint)

    def forget(self, name: bytes, *, unless_used: bool = False) -> None:
        """Drop the state after this block: no sequence may start from it any more. unless_used:
        drop it only if none has done so."""
        checkpoint = self._index.get(name)
        if checkpoint is not None and not (unless_used and self._num_loads[checkpoint]):
            self._forget(checkpoint)

    def _forget(self, checkpoint: int) -> None:
        name = self._name[checkpoint]
        if name is not None:
            del self._index[name]
            self._name[checkpoint] = None
            if checkpoint not in self._held:
                self._free.append(checkpoint)

    def forget_all(self) -> None:
        """After a change of weights no state is true any more."""
        for name in list(self._index):
            self.forget(name)

    def check_invariants(self) -> None:
        """EngineError unless each checkpoint is free, reserved, named or held without a name, and
        one of these alone."""
        named = list(self._index.values())
        nameless = [each for each in self._held if self._name[each] is None]
        every = sorted([*named, *self._free, *self._unnamed, *nameless])
        if every != list(range(self.num_checkpoints)) or any(
            self._name[checkpoint] != name for name, checkpoint in self._index.items()
        ):
            raise EngineError(
                f"checkpoints of states are lost: {named} are named, {sorted(self._unnamed)} "
                f"reserved, {nameless} held and {self._free} free of {self.num_checkpoints}"
            )
