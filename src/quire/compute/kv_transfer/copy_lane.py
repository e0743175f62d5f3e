"""Copies that run beside the kernels of the current stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["CopyLane", "CudaLane", "Mark", "NoLane", "lane_of"]

Mark = Any
"""A point in the current stream or in the lane, which either may wait for."""


class CopyLane(Protocol):
    """The lane and the current stream each do their work in order. Only marks order one against the
    other."""

    def mark(self) -> Mark:
        """Return the point at which the current stream is."""
        ...

    def beside(self, work: Callable[[], None], after: Mark | None) -> Mark:
        """Let the lane do `work` when `after` is reached. Return the point at which it is done."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let later work of the current stream begin only after `mark`."""
        ...


class NoLane:
    """A lane for a CPU: everything is done when it is given."""

    def mark(self) -> Mark:
        return None

    def beside(self, work: Callable[[], None], after: Mark | None) -> Mark:
        del after
        work()

    def wait(self, mark: Mark) -> None:
        del mark


class CudaLane:
    """A stream of its own. The host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lane = torch.cuda.Stream(device)

    def mark(self) -> Mark:
        return torch.cuda.current_stream(self._device).record_event()

    def beside(self, work: Callable[[], None], after: Mark | None) -> Mark:
        if after is not None:
            self._lane.wait_event(after)
        with torch.cuda.stream(self._lane):
            work()
        return self._lane.record_event()

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


def lane_of(device: torch.device) -> CopyLane:
    """Return the lane of a device."""
    return NoLane() if device.type == "cpu" else CudaLane(device)
