"""Capture what a computation asks of the kernels, to have it replayed without Python in between:
what CUDA graphs are on a GPU.

While a computation is captured, it runs, and the kernel calls of its team are recorded. They name
addresses, so each must mean the same in a replay: inputs have to lie where they lay, and what the
computation allocates comes from an arena whose bytes stay. A torch operation that computes would
run now but not in a replay; it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops.native import replay_function
from quire.ops.replay import NotCapturableError, ReplayList
from quire.ops.team import Team

__all__ = ["ArenaFullError", "CaptureArena", "CapturedCalls", "NotCapturableError", "capture"]

_LINE = 64
"""Bytes of a cache line, where every buffer begins."""


class ArenaFullError(NotCapturableError):
    """A computation holds more at once than its arena."""


class CaptureArena:
    """The temporaries of captured computations. A buffer's bytes serve again when its tensor and
    all views of it are gone, within a computation as well as in the next one: two that never run at
    the same time may share an arena.

    capacity: bytes of address space; the system gives memory as it is first written.
    """

    def __init__(self, capacity: int) -> None:
        self._memory = np.empty(capacity + _LINE, np.uint8)
        self._memory = self._memory[-self._memory.ctypes.data % _LINE :][:capacity]
        self._in_use: dict[int, int] = {}  # bytes, by where they start

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor with the shape, strides and dtype of `like` (on the meta device).

        Raises ArenaFullError when no gap is large enough.
        """
        size = like.untyped_storage().nbytes()
        taken = (size // _LINE + 1) * _LINE
        start = self._gap(taken)
        block = self._memory[start : start + size]
        self._in_use[start] = taken
        weakref.finalize(block, self._in_use.pop, start)
        return _tensor_over(block, like)

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` of this arena without a hold on its bytes: good until others use them."""
        start = tensor.untyped_storage().data_ptr() - self._memory.ctypes.data
        if not 0 <= start < len(self._memory):
            raise NotCapturableError("what it gives lies outside the arena")
        size = tensor.untyped_storage().nbytes()
        return _tensor_over(self._memory[start : start + size], tensor)

    def _gap(self, size: int) -> int:
        """Where the first gap of `size` bytes starts."""
        start = 0
        for offset in sorted(self._in_use):
            if offset - start >= size:
                break
            start = offset + self._in_use[offset]
        if start + size > len(self._memory):
            raise ArenaFullError(f"they hold more than {len(self._memory)} bytes at once")
        return start


def _tensor_over(block: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """`block` seen as `like`; it lives as long as the tensor and all views of it."""
    whole = torch.from_numpy(block).view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), like.storage_offset())


@dataclass(frozen=True, slots=True)
class CapturedCalls:
    """result: what the computation gave, in the arena: to be read before anything else is captured
    or replayed there."""

    calls: ReplayList
    result: torch.Tensor

    def replay(self) -> torch.Tensor:
        """Compute again from what the inputs hold now. Raises EngineError if a kernel fails."""
        self.calls.run()
        return self.result


def capture(team: Team, arena: CaptureArena, compute: Callable[[], torch.Tensor]) -> CapturedCalls:
    """Run `compute` and record the kernels that `team` computes in it.

    Raises NotCapturableError with the reason if a replay would not do the same; what the
    computation has written until then stays written.
    """
    with team.recording() as calls, _NothingButKernels(arena):
        result = compute()
    if not calls:
        raise NotCapturableError("it calls no kernels")
    replay = replay_function(calls[0].isa)
    return CapturedCalls(ReplayList(replay, calls), arena.borrowed(result))


class _NothingButKernels(TorchDispatchMode):
    """Allocates in the arena, lets through what only looks at memory, and refuses all else."""

    _ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})

    def __init__(self, arena: CaptureArena) -> None:
        super().__init__()
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's hook: else the first capture imports its compiler, which takes two seconds and
        makes a folder for temporary files."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func.overloadpacket.__name__ in self._ALLOCATIONS:
            return self._arena.empty(func(*args, **{**kwargs, "device": "meta"}))
        writes = func._schema.is_mutable  # noqa: SLF001  torch has no other name for it
        result = None if writes else func(*args, **kwargs)
        if not _is_view(result, args):
            raise NotCapturableError(f"it computes {func} in torch")
        return result


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether all that an operation gave is memory that it was given."""
    results = result if isinstance(result, tuple | list) else (result,)
    given = {_storage(value) for value in args if isinstance(value, torch.Tensor)}
    return all(isinstance(value, torch.Tensor) and _storage(value) in given for value in results)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
