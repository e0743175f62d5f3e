"""Recorded kernel calls, and one call into C++ that makes them all again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.base.errors import EngineError

__all__ = ["KernelCall", "NotCapturableError", "ReplayList", "kernel_error"]


class NotCapturableError(EngineError):
    """The computation does something that a replay would leave out. It can run uncaptured."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call in the form of `QUIRE_REPLAYABLE` in csrc/native/replay.h.

    kernel: address of the exported function. arguments: 8 bytes each, the team's last. The owner of
    the call must keep alive the memory to which they point.
    """

    isa: str
    name: str
    kernel: int
    arguments: bytes


class _Call(ctypes.Structure):
    """struct Call of csrc/native/replay.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class ReplayList:
    """The calls in order, in memory that C++ reads."""

    def __init__(self, replay: Callable[..., int], calls: Sequence[KernelCall]) -> None:
        """replay: `quire_replay` of any library.

        words: int64, all arguments of all calls; they are read when the calls are made.
        """
        self._replay = replay
        self._names = [(call.isa, call.name) for call in calls]
        packed = b"".join(call.arguments for call in calls)
        self.words = np.frombuffer(packed, np.int64).copy()
        self._calls = (_Call * len(calls))()
        address = self.words.ctypes.data
        for entry, call in zip(self._calls, calls, strict=True):
            entry.kernel, entry.arguments = call.kernel, address
            address += len(call.arguments)
        self._failed = ctypes.c_int64()

    def __len__(self) -> int:
        return len(self._calls)

    def run(self, count: int | None = None) -> None:
        """Make the first `count` calls, or all, without the interpreter lock. Raises EngineError at
        the first that fails; later calls are not made."""
        count = len(self._calls) if count is None else count
        code = self._replay(self._calls, count, ctypes.byref(self._failed))
        if code != 0:
            raise kernel_error(*self._names[self._failed.value], code)


def kernel_error(isa: str, name: str, code: int) -> EngineError:
    """Return the error to raise when a kernel returned `code`."""
    return EngineError(
        f"The {isa} kernel {name} failed with code {code} "
        "(1: element type it does not know, 2: no memory for scratch, 3: an index "
        "outside the table, 4: the ranks' group is over, 5: another rank failed, 6: ranks differ). "
        "Set QUIRE_CPU_ISA=none to run without these kernels."
    )
