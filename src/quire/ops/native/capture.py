"""Captures the kernel calls of a computation, to replay them without Python in between, like CUDA
graphs on a GPU.

During a capture nothing is computed; the kernel calls of the team are recorded. They contain
addresses, so each must mean the same in a replay: inputs must stay in place, and the computation
allocates from an arena whose bytes stay. A torch operation that computes would be missing from a
replay, so it is refused.

`capture_sizes` serves a computation of any size, such as any number of tokens. It is recorded for a
few sizes, without being run, and only numbers that are proportional to a size may differ.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops.native.binding import replay_function
from quire.ops.native.huge_pages import give_back, map_huge_pages
from quire.ops.native.replay import KernelCall, NotCapturableError, ReplayList
from quire.ops.native.team import Team

__all__ = [
    "ArenaFullError",
    "CaptureArena",
    "NotCapturableError",
    "SizedCalls",
    "capture_sizes",
    "record_calls",
    "replay_list",
]

_LINE = 64
"""Bytes of a cache line, where every buffer begins."""


class ArenaFullError(NotCapturableError):
    """The arena is too small for the temporaries of a computation."""


class CaptureArena:
    """The temporaries of captured computations. Bytes are reused when a tensor and all views of it
    are gone, within a computation and in the next one. Two computations that never run at the same
    time may share an arena.

    capacity: bytes of address space; the system provides memory as it is first written.
    """

    def __init__(self, capacity: int) -> None:
        self._memory = map_huge_pages(capacity)[:capacity].numpy()
        self._in_use: dict[int, int] = {}  # bytes, by their start

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape, strides and dtype of `like` (on the meta device).

        Raises ArenaFullError when no gap is large enough.
        """
        size = like.untyped_storage().nbytes()
        taken = (size // _LINE + 1) * _LINE
        start = self._gap(taken)
        block = self._memory[start : start + size]
        self._in_use[start] = taken
        weakref.finalize(block, self._in_use.pop, start)
        return _tensor_over(block, like)

    def start_of(self, tensor: torch.Tensor) -> int:
        """Return the offset of `tensor`'s bytes in this arena."""
        start = tensor.untyped_storage().data_ptr() - self._memory.ctypes.data
        if not 0 <= start < len(self._memory):
            raise NotCapturableError("what it gives lies outside the arena")
        return start

    def at(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `empty` at `start`, without reserving the bytes: valid until others
        use them."""
        size = like.untyped_storage().nbytes()
        return _tensor_over(self._memory[start : start + size], like)

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` of this arena without reserving the bytes: valid until others use
        them."""
        return self.at(self.start_of(tensor), tensor)

    def give_back(self) -> None:
        """Give the memory back to the system until buffers are written again. The contents are
        lost, so nothing may be in use."""
        give_back(self._memory.ctypes.data, len(self._memory))

    def _gap(self, size: int) -> int:
        """Return the start of the first gap of `size` bytes."""
        start = 0
        for offset in sorted(self._in_use):
            if offset - start >= size:
                break
            start = offset + self._in_use[offset]
        if start + size > len(self._memory):
            raise ArenaFullError(f"they hold more than {len(self._memory)} bytes at once")
        return start


def _tensor_over(block: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return `block` in the form of `like`; it lives as long as the tensor and all views of it."""
    whole = torch.from_numpy(block).view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), like.storage_offset())


@contextlib.contextmanager
def record_calls(team: Team, arena: CaptureArena) -> Iterator[list[KernelCall]]:
    """Record the kernels that `team` is asked for meanwhile; none runs. Allocations are in the
    arena.

    Raises NotCapturableError with the reason if a replay would not do the same.
    """
    with team.recording(computes=False) as calls, _NothingButKernels(arena.empty):
        yield calls


def replay_list(calls: Sequence[KernelCall]) -> ReplayList:
    """Return the calls for replay. Raises NotCapturableError if there are none."""
    if not calls:
        raise NotCapturableError("it calls no kernels")
    return ReplayList(replay_function(calls[0].isa), calls)


@dataclass(frozen=True, slots=True)
class SizedCalls:
    """Calls with words that follow the sizes of a computation: `words[index]` is factor ·
    sizes[size].

    result: tensor for the largest sizes, in the arena; read it before the next capture or replay
    there.
    """

    calls: ReplayList
    result: torch.Tensor
    index: npt.NDArray[np.int64]
    factor: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]

    def replay(self, *sizes: int) -> torch.Tensor:
        """Compute for `sizes`, none of which may exceed those of the capture. Only the part of the
        result that belongs to these sizes is valid. Raises EngineError if a kernel fails."""
        self.calls.words[self.index] = self.factor * np.array(sizes, np.int64)[self.size]
        self.calls.run()
        return self.result


def capture_sizes(
    team: Team,
    arena: CaptureArena,
    compute: Callable[..., torch.Tensor],
    largest: tuple[int, ...],
) -> SizedCalls:
    """Record the kernels that `team` would run in `compute(*sizes)`; none runs.

    From one recording to the next a single size changes, from the largest to 1, the last size
    first. So a word that depends on one size is not mistaken for a multiple of another.

    Raises NotCapturableError with the reason if a replay for some sizes would not do the same, as
    far as these recordings show.
    """
    recorded = [
        largest[:kept] + (1,) * (len(largest) - kept) for kept in range(len(largest), -1, -1)
    ]
    places = _Places(arena)
    recordings: list[list[KernelCall]] = []
    results: list[torch.Tensor] = []
    for sizes in recorded:
        with team.recording(computes=False) as calls, _NothingButKernels(places.empty):
            results.append(arena.borrowed(compute(*sizes)))
        places.repeat()
        recordings.append(calls)
    follows = _what_follows(recordings, np.array(recorded))
    if len({result.data_ptr() for result in results}) > 1:
        raise NotCapturableError("its result lies elsewhere for other sizes")
    return SizedCalls(replay_list(recordings[0]), results[0], *follows)


def _what_follows(
    recordings: Sequence[Sequence[KernelCall]], sizes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`index`, `factor` and `size` of `SizedCalls` for all words that differ between recordings of
    sizes [recordings, S]."""
    if len({tuple(call.kernel for call in calls) for calls in recordings}) > 1:
        raise NotCapturableError("it calls other kernels for other sizes")
    words = np.array(
        [
            np.frombuffer(b"".join(call.arguments for call in calls), np.int64)
            for calls in recordings
        ]
    )
    index = np.flatnonzero((words != words[0]).any(axis=0))
    differing = words[:, index]  # [recordings, words]
    factors = differing[0] // sizes[0][:, None]  # [S, words]
    follows = (factors[None] * sizes[:, :, None] == differing[:, None]).all(axis=0)
    if not follows.any(axis=0).all():
        raise NotCapturableError("an argument of its kernels is no multiple of a size")
    size = follows.argmax(axis=0)
    return index, factors[size, np.arange(len(index))], size


class _Places:
    """Places of the buffers of one recording, which later recordings reuse."""

    def __init__(self, arena: CaptureArena) -> None:
        self._arena = arena
        self._taken: list[tuple[int, int]] = []  # start and bytes, in order of allocation
        self._again: Iterator[tuple[int, int]] | None = None

    def repeat(self) -> None:
        self._again = iter(self._taken)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        size = like.untyped_storage().nbytes()
        if self._again is None:
            tensor = self._arena.empty(like)
            self._taken.append((self._arena.start_of(tensor), size))
            return tensor
        start, room = next(self._again, (0, -1))
        if size > room:
            raise NotCapturableError("it takes other buffers for other sizes")
        return self._arena.at(start, like)


class _NothingButKernels(TorchDispatchMode):
    """Makes `empty` allocate in the arena, allows operations that only view memory, and refuses all
    others."""

    _ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})

    def __init__(self, empty: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """empty: makes a tensor like one on the meta device."""
        super().__init__()
        self._empty = empty

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's hook. Without it the first capture imports torch's compiler, which takes two
        seconds and creates a folder for temporary files."""
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
            return self._empty(func(*args, **{**kwargs, "device": "meta"}))
        writes = func._schema.is_mutable  # noqa: SLF001  torch has no other name for it
        result = None if writes else func(*args, **kwargs)
        if not _is_view(result, args):
            raise NotCapturableError(f"it computes {func} in torch")
        return result


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Return True if all results of an operation are memory that it was given."""
    results = result if isinstance(result, tuple | list) else (result,)
    given = {_storage(value) for value in args if isinstance(value, torch.Tensor)}
    return all(isinstance(value, torch.Tensor) and _storage(value) in given for value in results)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
