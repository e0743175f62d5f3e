"""The order in which a device works: one stream that computes, one that brings results back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

__all__ = ["CudaQueue", "DeviceQueue", "HostQueue", "Mark", "Arrival", "queue_of"]


class Mark(Protocol):
    """A point in the queue."""

    def wait(self) -> object:
        """Wait until the device has passed the mark. Raises what broke the device before."""
        ...


class Arrival(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[np.ndarray]:
        """Wait for the copies, and return their values. Raises what broke the device before."""
        ...


class DeviceQueue(Protocol):
    """All work given within `computing` is done in the order in which it is given."""

    device: torch.device

    def computing(self) -> AbstractContextManager[object]:
        """Return a context whose work by torch and kernels goes to this queue."""
        ...

    def host_buffer(self, num_words: int) -> torch.Tensor:
        """int32 [num_words] that the device can read while the host goes on."""
        ...

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        """Copy a part of a host buffer to the device; it must not change before the mark."""
        ...

    def copy_out(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        """Bring tensors to the host as they are at this point of the queue, beside what is given
        after it. They must not be written again by then."""
        ...

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """A copy of an array on the device. The host may change the array at once."""
        ...


class HostQueue:
    """A queue for tensors of the CPU: everything is done when it is given."""

    device = torch.device("cpu")

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_buffer(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32)

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        target.copy_(source)
        return _Done([])

    def copy_out(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        return _Done([tensor.numpy().copy() for tensor in tensors])

    def upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())


class _Done:
    def __init__(self, values: list[np.ndarray]) -> None:
        self._values = values

    def wait(self) -> list[np.ndarray]:
        return self._values


class CudaQueue:
    """Two streams of a GPU. Host memory is pinned, so that no copy waits for the host; torch keeps
    pinned memory of its own allocator until copies out of it and into it are over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._main = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # weights were loaded on another stream

    def computing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._main)

    def host_buffer(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> Mark:
        with torch.cuda.stream(self._main):
            target.copy_(source, non_blocking=True)
        return _EventMark(self._main)

    def copy_out(self, tensors: Sequence[torch.Tensor]) -> Arrival:
        self._copies.wait_stream(self._main)
        targets: list[torch.Tensor] = []
        with torch.cuda.stream(self._copies):
            for tensor in tensors:
                target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                target.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copies)  # its memory serves nobody else before
                targets.append(target)
        return _CudaArrival(targets, _EventMark(self._copies))

    def upload(self, array: np.ndarray) -> torch.Tensor:
        pinned = torch.from_numpy(array).pin_memory()
        with torch.cuda.stream(self._main):
            return pinned.to(self.device, non_blocking=True)


class _EventMark:
    """Waiting threads sleep instead of polling the driver."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class _CudaArrival:
    def __init__(self, targets: list[torch.Tensor], mark: Mark) -> None:
        self._targets = targets
        self._mark = mark

    def wait(self) -> list[np.ndarray]:
        self._mark.wait()
        return [target.numpy() for target in self._targets]


def queue_of(device: torch.device) -> DeviceQueue:
    """The queue of a device."""
    return HostQueue() if device.type == "cpu" else CudaQueue(device)
