"""GPU memory that this process holds."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["CudaMemory", "DeviceMemory"]


class DeviceMemory(Protocol):
    """Bytes of one device. total: all bytes of the device. free: bytes that all programs left free
    before this one took any."""

    total: int
    free: int

    def tensors(self) -> int:
        """Return the bytes in tensors now."""
        ...

    def held(self) -> int:
        """Return the bytes that this process holds, after it has given back its reserve."""
        ...

    def watch(self) -> None:
        """Reset the peak that `most_held` reads."""
        ...

    def most_held(self) -> int:
        """Return the most bytes held at any time since `watch`."""
        ...

    def num_refused(self) -> int:
        """Count the times that memory ran out since `watch`."""
        ...


class CudaMemory:
    """`DeviceMemory` of a CUDA or ROCm device, which counts what torch does not: the driver's
    context, code of kernels, workspaces of libraries."""

    def __init__(self, device: torch.device, free: int) -> None:
        """free: bytes that all programs left free before this process touched the device; 0 if
        nobody looked."""
        free_now, self.total = torch.cuda.mem_get_info(device)
        self.free = free or free_now
        self._device = device
        self._refused_before = 0

    def tensors(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def held(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return self._taken()

    def watch(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._refused_before = self._refused()

    def most_held(self) -> int:
        torch.cuda.synchronize(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return self._taken() + torch.cuda.max_memory_reserved(self._device) - reserved

    def num_refused(self) -> int:
        return self._refused() - self._refused_before

    def _refused(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_ooms", 0))

    def _taken(self) -> int:
        return max(self.free - torch.cuda.mem_get_info(self._device)[0], 0)
