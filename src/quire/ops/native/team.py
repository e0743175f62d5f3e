"""The threads that compute: one team for all kernels of a model (csrc/native/team.h)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from quire.base.errors import EngineError
from quire.base.platform.priority import give_way
from quire.ops.native.replay import KernelCall

__all__ = ["ALONE", "Team", "torch_threads"]

SPIN_MICROSECONDS = 200
"""Time that an idle thread spins before it sleeps: longer than the gap between two kernels of a
step, shorter than the gap between two steps."""


class Team:
    """The threads that compute the kernels of a model together.

    num_threads: including the calling thread. Threads start with the first library that needs them,
    and end with the team. A forked child has none of them and computes alone.

    recorded: list to which kernel calls are appended, or None. computes: True if recorded calls are
    also made.
    """

    def __init__(self, num_threads: int, *, gives_way: bool = False) -> None:
        """gives_way: True if its members let all other threads go first. The calling thread has a
        priority of its own."""
        self.num_threads, self._gives_way = num_threads, gives_way
        self.recorded: list[KernelCall] | None = None
        self.computes = True
        self._handle: int | None = None

    def start(self, library: ctypes.CDLL) -> int | None:
        """Return the team in the form that kernels take; None for a team of one. Raises
        EngineError."""
        if self.num_threads > 1 and self._handle is None:
            create, destroy = library.quire_team_create, library.quire_team_destroy
            create.argtypes, create.restype = (ctypes.c_int32, ctypes.c_int32), ctypes.c_void_p
            destroy.argtypes, destroy.restype = (ctypes.c_void_p,), None
            self._handle = self._created(create)
            if self._handle is None:
                raise EngineError(
                    f"The system gives no {self.num_threads} threads. Set num_threads lower."
                )
            # Not at the end of the interpreter: a daemon thread may be in a kernel then, and would
            # go on in a team that is gone. The system ends the members with the process.
            weakref.finalize(self, destroy, self._handle).atexit = False
        return self._handle

    def _created(self, create: Callable[[int, int], int | None]) -> int | None:
        if not self._gives_way:
            return create(self.num_threads, SPIN_MICROSECONDS)
        with ThreadPoolExecutor(1, initializer=give_way) as starter:  # members inherit it
            return starter.submit(create, self.num_threads, SPIN_MICROSECONDS).result()

    @contextmanager
    def recording(self, *, computes: bool = True) -> Iterator[list[KernelCall]]:
        """Record the kernel calls of the team meanwhile, of any library."""
        self.recorded, self.computes = (calls := list[KernelCall]()), computes
        try:
            yield calls
        finally:
            self.recorded, self.computes = None, True


ALONE = Team(1)
"""The calling thread alone."""


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute what this thread asks for with `count` threads meanwhile."""
    import torch  # here, since an engine is built without it

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
