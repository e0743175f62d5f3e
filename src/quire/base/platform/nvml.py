"""NVIDIA's GPUs, by the management library of their driver (NVML).

It answers without a CUDA context, so that a plan costs no device memory and no import of torch.
Its order is that of the PCI bus, which CUDA follows with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from quire.base.platform.gpu_facts import GpuFacts, GpuSearch

__all__ = ["search_gpus"]

_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96  # the longest of NVML's texts

# nvmlReturn_t
_FUNCTION_NOT_FOUND = 13  # of older drivers
_FAILURES = {
    9: "the NVIDIA driver is not loaded: load it, or start the container with its GPUs",
    17: "the operating system blocks the NVIDIA driver: let this user open /dev/nvidia*",
    18: "the NVIDIA driver was updated while it ran: restart the machine",
}


class _NvmlError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def search_gpus(visible: str | None, library: Any = None) -> GpuSearch:
    """Return the GPUs that CUDA_VISIBLE_DEVICES=`visible` leaves; all of them if it is None.

    library: library with NVML's functions; the driver's own if None.
    """
    if library is None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError:
            return GpuSearch()
    nvml = _Nvml(library)
    try:
        with nvml.session():
            handles = nvml.handles()
            chosen = nvml.instances(handles) if visible is None else nvml.named(visible, handles)
            found = [nvml.facts(handle) for handle in chosen]
    except _NvmlError as error:
        known = _FAILURES.get(error.code)
        text = f"the NVIDIA driver fails with code {error.code} of NVML: does nvidia-smi work?"
        return GpuSearch(failure=known or text)
    gpus = tuple(replace(gpu, num_visible=len(found)) for gpu in found)
    return GpuSearch(gpus, num_present=len(handles))


class _Nvml:
    """NVML's functions as Python ones; each raises _NvmlError with the code that it gives."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @contextmanager
    def session(self) -> Generator[None]:
        self._call("nvmlInit_v2")
        try:
            yield
        finally:
            self._library.nvmlShutdown()

    def handles(self) -> list[ctypes.c_void_p]:
        """Return the handles of the physical GPUs."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [
            self._handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
            for index in range(count.value)
        ]

    def named(self, visible: str, handles: list[ctypes.c_void_p]) -> list[ctypes.c_void_p]:
        """Return the handles named in a list such as "1,0" or "GPU-5a3c,MIG-…". As in CUDA, the
        first invalid name ends the list."""
        chosen: list[ctypes.c_void_p] = []
        for name in (part.strip() for part in visible.split(",")):
            found = self._named(name, handles)
            if found is None:
                break
            chosen.append(found)
        return chosen

    def _named(self, name: str, handles: list[ctypes.c_void_p]) -> ctypes.c_void_p | None:
        if name.isdecimal():
            index = int(name)
            return self.instances(handles[index : index + 1])[0] if index < len(handles) else None
        if name.startswith("MIG-"):
            try:
                return self._handle("nvmlDeviceGetHandleByUUID", name.encode())
            except _NvmlError:
                return None
        matches = [each for each in handles if name and self._uuid(each).startswith(name)]
        return self.instances(matches)[0] if len(matches) == 1 else None

    def instances(self, handles: list[ctypes.c_void_p]) -> list[ctypes.c_void_p]:
        """Each GPU itself, or the first part of one that is cut into parts (MIG), which is what
        CUDA gives a process then."""
        return [self._first_part(handle) or handle for handle in handles]

    def _first_part(self, handle: ctypes.c_void_p) -> ctypes.c_void_p | None:
        mode, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", handle, ctypes.byref(mode), ctypes.byref(pending))
            if not mode.value:
                return None
            self._call("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(most))
        except _NvmlError:
            return None  # this GPU cannot be cut
        for index in range(most.value):
            try:
                return self._handle(
                    "nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index)
                )
            except _NvmlError:
                continue  # no part of this number
        return None

    def facts(self, handle: ctypes.c_void_p) -> GpuFacts:
        memory = _Memory()
        try:
            self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        except _NvmlError:
            memory = _Memory()  # it shares the host's memory, and has no such figure
        capability = self._capability(handle)
        return GpuFacts(
            vendor="nvidia",
            name=self._text("nvmlDeviceGetName", handle),
            architecture=f"SM {capability[0]}{capability[1]}",
            capability=capability,
            memory_bytes=int(memory.total),
            free_bytes=int(memory.free),
            driver=self._text("nvmlSystemGetDriverVersion"),
            driver_cuda=self._driver_cuda(),
        )

    def _capability(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        name = "nvmlDeviceGetCudaComputeCapability"
        try:
            self._call(name, handle, ctypes.byref(major), ctypes.byref(minor))
        except _NvmlError:  # a part of a GPU (MIG) does not say; the whole does
            whole = self._handle("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
            self._call(name, whole, ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def _driver_cuda(self) -> tuple[int, int]:
        version = ctypes.c_int()
        self._call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        return version.value // 1000, version.value % 1000 // 10

    def _uuid(self, handle: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetUUID", handle)

    def _text(self, function: str, *first: Any) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(function, *first, text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode(errors="replace")

    def _handle(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(function, *arguments, ctypes.byref(handle))
        return handle

    def _call(self, function: str, *arguments: Any) -> None:
        called = getattr(self._library, function, None)
        code = _FUNCTION_NOT_FOUND if called is None else called(*arguments)
        if code:
            raise _NvmlError(code)
