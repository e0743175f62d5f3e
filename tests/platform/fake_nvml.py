"""NVIDIA's management library, played by Python: it answers through the pointers it is given."""

# The functions have the names of the library's.
# ruff: noqa: N802

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FakeGpu", "FakeNvml"]

_NOT_SUPPORTED, _NOT_FOUND = 3, 6


@dataclass
class FakeGpu:
    """parts: UUIDs of the parts that it is cut into (MIG)."""

    uuid: str
    name: str = "Test GPU"
    capability: tuple[int, int] = (9, 0)
    total: int = 80 * 2**30
    free: int = 79 * 2**30
    parts: tuple[str, ...] = ()


class FakeNvml:
    """failure: the code with which it does not start. Handles are 1, 2, … of GPUs, and 1000 times
    that plus 1, 2, … of their parts."""

    def __init__(self, gpus: list[FakeGpu], cuda: int = 12080, failure: int = 0) -> None:
        self._gpus, self._cuda, self._failure = gpus, cuda, failure
        self.num_open = 0

    def nvmlInit_v2(self) -> int:
        self.num_open += not self._failure
        return self._failure

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        for number, gpu in enumerate(self._gpus, 1):
            if uuid.decode() in gpu.parts:
                handle._obj.value = 1000 * number + gpu.parts.index(uuid.decode()) + 1
                return 0
        return _NOT_FOUND

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        del size
        text.value = self._gpu(handle).uuid.encode()
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        del size
        text.value = (self._gpu(handle).name + " MIG" * (handle.value > 1000)).encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        gpu = self._gpu(handle)
        if not gpu.total:
            return _NOT_SUPPORTED
        share = len(gpu.parts) if handle.value > 1000 else 1
        memory._obj.total, memory._obj.free = gpu.total // share, gpu.free // share
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, mode: Any, pending: Any) -> int:
        del pending
        if self._gpu(handle).capability < (8, 0):
            return _NOT_SUPPORTED
        mode._obj.value = bool(self._gpu(handle).parts)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        del handle
        count._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, part: Any) -> int:
        first = 2  # parts may leave gaps in the numbers
        if not first <= index.value < first + len(self._gpu(handle).parts):
            return _NOT_FOUND
        part._obj.value = 1000 * handle.value + index.value - first + 1
        return 0

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Any, handle: Any) -> int:
        handle._obj.value = part.value // 1000
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        if handle.value > 1000:
            return _NOT_SUPPORTED
        major._obj.value, minor._obj.value = self._gpu(handle).capability
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        del size
        text.value = b"570.86.10"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        version._obj.value = self._cuda
        return 0

    def _gpu(self, handle: Any) -> FakeGpu:
        number = handle.value // 1000 if handle.value > 1000 else handle.value
        return self._gpus[number - 1]
